"""Evictions: the one way in which a submitted save is lost, written down where it happens.

A trainer that needs a slot appends a line to ``evictions.jsonl`` in the job's folder of the spool.
The flow worker of the node reports it: metrics, log and event. The file goes with the folder. It is
in memory, so its size is limited: beyond it, the older lines are replaced by one with their number.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.lock_file import LockFile
from trinity_sync.fs.records import Count, Seconds
from trinity_sync.layout import Kind

EVICTIONS = "evictions.jsonl"
MAX_BYTES = 256 << 10
"""Size in bytes beyond which the older half of the file is dropped."""
_DROPPED = "dropped"
_LOCK_S = 1.0
"""Seconds that a trainer waits for another rank of the node that appends a line."""


@dataclass(frozen=True)
class Eviction:
    """An image that was removed from its slot although its save was not committed."""

    image: str
    """Random name of the image, as in its ticket."""
    run: Count
    step: Count
    kind: Kind
    role: str
    component: str
    rank: Count
    for_step: Count
    """The step that needed the slot."""
    evicted_at: Seconds
    """Seconds since the epoch."""
    why: str


def record_eviction(folder: Path, eviction: Eviction) -> None:
    """Append an eviction to the file in a job's folder of the spool.

    Raises:
        OSError: the file cannot be written.
        LockTimeoutError: another process has locked the file for a second.
    """
    path = folder / EVICTIONS
    line = json.dumps(asdict(eviction)) + "\n"
    while True:
        with closing(LockFile(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)) as file:
            file.acquire(limit_s=_LOCK_S)
            found = os.fstat(file.fd)
            if found.st_nlink and found.st_size <= MAX_BYTES:
                os.write(file.fd, line.encode())
                return
            if found.st_nlink:  # otherwise another rank has replaced the file
                _drop_older_half(path)


def read_evictions(folder: Path) -> Sequence[Eviction]:
    """Return the last evictions of a job on this node, oldest first, without lines that are torn.

    The file is parsed only if it has changed.
    """
    return list(_read(folder)[0])


def count_evictions(folder: Path) -> Counter[Kind]:
    """Return the number of images of a job that were evicted on this node, by kind.

    It includes those that `read_evictions` no longer returns.
    """
    evictions, dropped = _read(folder)
    return dropped + Counter(each.kind for each in evictions)


def _drop_older_half(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    middle = (len(lines) + 1) // 2
    evictions, dropped = _parse(b"".join(lines[:middle]))
    dropped += Counter(each.kind for each in evictions)
    first = json.dumps({_DROPPED: dropped}) + "\n"
    content = first.encode() + b"".join(lines[middle:])
    replace_file(path, content, mode=0o600, sync=False, own_name=False)  # under the file's lock


def _read(folder: Path) -> tuple[tuple[Eviction, ...], Counter[Kind]]:
    path = folder / EVICTIONS
    try:
        found = path.stat()
        return _read_version(path, (found.st_ino, found.st_size, found.st_mtime_ns))
    except FileNotFoundError:
        return (), Counter()


@lru_cache(maxsize=16)
def _read_version(
    path: Path, _version: tuple[int, ...]
) -> tuple[tuple[Eviction, ...], Counter[Kind]]:
    return _parse(path.read_bytes())


def _parse(content: bytes) -> tuple[tuple[Eviction, ...], Counter[Kind]]:
    """Return the evictions in lines of the file, and the number of those that were dropped."""
    found: list[Eviction] = []
    dropped: Counter[Kind] = Counter()
    for line in content.splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and _DROPPED in entry:
                dropped.update(msgspec.convert(entry[_DROPPED], dict[Kind, Count]))
            else:
                found.append(msgspec.convert(entry, Eviction))
    return tuple(found), dropped
