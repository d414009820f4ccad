"""Evictions: the one way in which a submitted save is lost, written down where it happens.

A trainer that needs a slot appends a line to ``evictions.jsonl`` in the job's folder of the spool.
The flow worker of the node reports it: metrics, log and event. The file goes with the folder.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from trinity_sync.fs.records import Count, Seconds
from trinity_sync.layout import Kind

EVICTIONS = "evictions.jsonl"


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
    """Append an eviction to the file of a job.

    Args:
        folder: the job's folder in the spool.
        eviction: the eviction.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(asdict(eviction)) + "\n"
    # one write of a line: ranks of a node append to the same file
    file = os.open(folder / EVICTIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_evictions(folder: Path) -> Sequence[Eviction]:
    """Return the evictions of a job on this node, oldest first; lines that are torn are skipped.

    Args:
        folder: the job's folder in the spool.
    """
    try:
        lines = (folder / EVICTIONS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.convert(json.loads(line), Eviction))
        except ValueError:
            continue
    return found
