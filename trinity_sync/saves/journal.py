"""The journal of a root: who works on a save, and why it failed.

The manifest alone tells that a save is committed; the journal decides nothing. Who drives a save
writes it: the stack's worker or the saver, and a trainer for what it alone knows. All ranks and the
commands read it.

::

    root/.trinity_sync/journal/run3-1b4f0e98.5d41402a.jsonl
        {"key": "...step40/checkpoint", ..., "start": 1, "state": "begun", ...}
        {"key": "...step40/checkpoint", ..., "start": 1, "state": "failed", "message": "...", ...}

Each process has a file of its own for each run of the job. A flow run that is retried counts its
starts: lines of the last start count, and of these the one that tells an end. The saver and a
trainer name the start that they take over, whose own lines count no longer. So neither the order of
the lines nor the clocks of the nodes matter. The lines are not synced, and a truncated line is
ignored.
"""

import logging
import time
import uuid
from contextlib import suppress
from functools import cache
from os import getpid
from pathlib import Path
from typing import Literal, get_args

import msgspec

from trinity_sync.fs.atomic import (
    list_paths,
    list_uncached,
    make_folder,
    open_no_follow,
    open_to_append,
    remove_file,
)
from trinity_sync.fs.records import decode_lines
from trinity_sync.layout import PRIVATE_FOLDER, Kind, parse_number
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.identity import label_run

logger = logging.getLogger(__name__)

KEEP_S = 7 * 86400.0
"""Seconds since its last line after which a later run removes a file."""
PATIENCE_S = 600.0
"""Seconds for which an end is written again, such as while the disk is full or the root is away."""
_PAUSE_S = 2.0
_REMEMBERED = 4096
"""Number of saves that a reader keeps; it forgets the completed ones first."""

SaveState = Literal["begun", "left", "failed", "completed"]
"""In order of rank. Left: the stack cannot do it, for a fault of its own, so the saver has to."""

STATES_OF_RUNS: dict[str, SaveState] = {
    **dict.fromkeys(("RUNNING", "PENDING", "CANCELLING"), "begun"),
    **dict.fromkeys(("FAILED", "CRASHED", "CANCELLED"), "failed"),
    "COMPLETED": "completed",
}
"""What a flow run tells of its save, by the type of its state; nothing while it is scheduled."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line: the state of a save."""

    key: str
    """Request key of the save."""
    run: int
    step: int
    kind: Kind
    attempt: int
    start: int
    """Number of the flow run's start, 0 if none has begun it."""
    takes_over: bool
    """Whether the saver or a trainer tells it, in the place of that start."""
    state: SaveState
    message: str
    """Why it failed, or why the stack leaves it to the saver."""
    url: str
    """Page of the flow run in the Prefect UI."""
    at: float
    """Seconds since the epoch."""

    @property
    def rank(self) -> tuple[int, bool, int, float]:
        """Of two entries of a save, the one with the higher rank counts."""
        return self.start, self.takes_over, get_args(SaveState).index(self.state), self.at

    @property
    def is_left(self) -> bool:
        """Whether the stack leaves it to the saver."""
        return self.state == "left"

    @property
    def has_failed(self) -> bool:
        """Whether the attempt has failed."""
        return self.state == "failed"

    @property
    def has_ended(self) -> bool:
        """Whether the attempt is over."""
        return self.state in ("failed", "completed")


def append(
    request: SaveRequest,
    state: SaveState,
    message: str = "",
    *,
    url: str = "",
    start: int = 0,
    over: Entry | None = None,
    patience_s: float = 0.0,
) -> Entry:
    """Append the state of a save; try again for some seconds, and log an error that remains.

    A worker gives the ``start`` of its flow run; others, what they take ``over``, if anything.
    """
    entry = Entry(
        key=request.key,
        run=request.run,
        step=request.step,
        kind=request.kind,
        attempt=request.attempt,
        start=over.start if over else start,
        takes_over=not start,
        state=state,
        message=message,
        url=over.url if over else url,
        at=time.time(),
    )
    until = time.monotonic() + patience_s
    line = msgspec.json.encode(entry) + b"\n"
    while True:
        try:
            _append(request, line)
        except OSError as error:
            if time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
            logger.warning(
                "Cannot write into %s that %s is %s: %s. Ranks that wait for it do not learn it; "
                "see trinity-sync runs, or saver.log",
                _folder(request.root),
                request.run_name,
                state,
                error,
            )
        return entry


def _append(request: SaveRequest, line: bytes) -> None:
    folder = _folder(request.root)
    path = folder / f"{label_run(request.save)}.{_own_name(getpid())}.jsonl"
    if not path.exists():
        folder.parent.stat()  # a root that was removed or is not mounted is not created again
        make_folder(folder)
        _remove_old(folder, request.run)
    # other NFS clients see the content of a file once it is closed
    with open_to_append(path) as file:
        file.write(line)


@cache
def _own_name(_: int) -> str:
    """Return the name of a process, which a forked child does not share."""
    return uuid.uuid4().hex[:8]


def _remove_old(folder: Path, run: int) -> None:
    """Remove files of earlier runs that nothing was added to for long."""
    for path in list_paths(folder, "run*.jsonl"):
        number = parse_number(path.name.removeprefix("run").partition("-")[0])
        with suppress(OSError):  # such as another user's file
            if number is not None and number < run and path.lstat().st_mtime < time.time() - KEEP_S:
                remove_file(path)


class Journal:
    """Reads the journal of a root: the files of one run of the job, or of all runs."""

    def __init__(self, root: str | Path, run_label: str = "*") -> None:
        self._folder = _folder(root)
        self._pattern = f"{run_label}.*.jsonl"
        self._offsets: dict[Path, int] = {}
        self._entries: dict[str, Entry] = {}
        self._given_up: dict[str, str] = {}

    @classmethod
    def of(cls, request: SaveRequest) -> "Journal":
        """Return the journal of the run that a save belongs to."""
        return cls(request.root, label_run(request.save))

    def read(self) -> None:
        """Read what was added since the last call.

        Raises:
            OSError: the root cannot be read.
        """
        for path in list_uncached(self._folder, self._pattern):
            offset = self._offsets.get(path, 0)
            try:
                with open_no_follow(path) as file:  # which asks an NFS server for its size
                    file.seek(offset)
                    whole = file.read().rpartition(b"\n")[0]
            except OSError:
                continue  # such as removed by a later run
            if whole:
                self._take(whole)
                self._offsets[path] = offset + len(whole) + 1

    def find(self, key: str) -> Entry | None:
        """Return the state of a save by its request key; None if nothing has begun it."""
        return self._entries.get(key)

    def explain_given_up(self, key: str) -> str:
        """Return why a saver has failed a save, also before a later start; empty if none has."""
        return self._given_up.get(key, "")

    def find_last(self) -> Entry | None:
        """Return what was written last; None if nothing was."""
        return max(self._entries.values(), key=lambda entry: entry.at, default=None)

    def list_failures(self) -> list[Entry]:
        """Return the saves whose last attempt has failed."""
        last: dict[tuple[int, int, Kind, str], Entry] = {}
        for entry in self._entries.values():
            save = entry.run, entry.step, entry.kind, entry.key.partition("/attempt")[0]
            if save not in last or last[save].attempt < entry.attempt:
                last[save] = entry
        return [entry for entry in last.values() if entry.has_failed]

    def _take(self, lines: bytes) -> None:
        for entry in decode_lines(Entry, lines):
            if entry.takes_over and entry.has_failed:
                self._given_up[entry.key] = entry.message
            known = self._entries.pop(entry.key, entry)
            self._entries[entry.key] = max(known, entry, key=lambda each: each.rank)
            if len(self._entries) > _REMEMBERED:  # those of other runs, which are read by name
                ended = (key for key, each in self._entries.items() if each.state == "completed")
                del self._entries[next(ended, next(iter(self._entries)))]


def read_entry(request: SaveRequest) -> Entry | None:
    """Return what the journal of its root says of a save; None if nothing has begun it.

    Raises:
        OSError: as `Journal.read`.
    """
    journal = Journal.of(request)
    journal.read()
    return journal.find(request.key)


def _folder(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "journal"
