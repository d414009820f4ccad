"""Share what rank 0 learns of a run's saves with the other ranks, which query no server.

::

    root/.trinity_sync/outcomes/run3-1b4f0e98.5d41402a.jsonl
        {"format": 1}
        {"key": "...step40/checkpoint", "state": "pending", "message": "", "url": ""}
        {"key": "...step40/checkpoint", "state": "failed", "message": "...", "url": "..."}

The rank 0 of each process group has a file of its own, and holds its lock while it follows saves. A
pending line says that rank 0 queries the server about a save, the next line how the save ended. The
lines save calls and decide nothing: they are not synced, a truncated line is ignored, and a rank
that finds no living rank 0 queries the server itself. The newest run removes the files of earlier
runs that no process holds.
"""

import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.fs.atomic import list_uncached, make_folder, make_temporary_path
from trinity_sync.fs.lock_file import LockFile
from trinity_sync.fs.locks import is_locked
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, parse_number
from trinity_sync.snapshot.safe_load import open_no_follow

logger = logging.getLogger(__name__)

UNANNOUNCED_S = 360.0
"""Seconds within which rank 0 submits a save that another rank has submitted: it may wait for a
slot (``slot_wait_s``)."""
_REMEMBERED = 1024
"""Number of saves of each file whose outcome a reader keeps."""


State = Literal["unknown", "pending", "running", "completed", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What is known of the flow run of a save, or of the saver's work on it."""

    state: State
    message: str = ""
    url: str = ""


class _Header(msgspec.Struct, frozen=True):
    """The first line of a file."""

    format: int


class _Line(msgspec.Struct, frozen=True):
    """Each other line."""

    key: str
    state: State
    message: str
    url: str


class OutcomeLog:
    """The file that this process, a rank 0, writes; ``request`` is any of the run's."""

    def __init__(self, request: SaveRequest) -> None:
        self._request = request
        self._path = Path()
        self._lock: LockFile | None = None

    def append(self, outcomes: Mapping[str, Outcome]) -> None:
        """Append outcomes by request key; on an error close the file, so that other ranks query."""
        lines = [
            msgspec.json.encode(_Line(key, each.state, each.message, each.url))
            for key, each in outcomes.items()
        ]
        try:
            if self._lock is None or not self._path.exists():  # it may have been removed
                self.close()
                self._begin()
            # other NFS clients see the content of a file once it is closed
            with self._path.open("ab") as file:
                file.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            logger.warning(
                "Cannot write the outcome of %s for the other ranks: %s. They query the Prefect "
                "server themselves",
                ", ".join(outcomes),
                error,
            )
            self.close()

    def close(self) -> None:
        """Release the lock: this process no longer follows saves."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _begin(self) -> None:
        folder = _folder(self._request.root)
        make_folder(folder)
        for path in folder.glob("run*.jsonl"):
            number = parse_number(path.name.removeprefix("run").partition("-")[0])
            with suppress(OSError):  # such as another user's file
                if number is not None and number < self._request.run and not is_locked(path):
                    path.unlink(missing_ok=True)
        self._path = folder / f"{self._request.save.run_label}.{uuid.uuid4().hex[:8]}.jsonl"
        # locked before it gets its name, so no rank finds it unlocked
        temporary = make_temporary_path(self._path)
        lock = LockFile(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            lock.acquire()
            temporary.write_bytes(msgspec.json.encode(_Header(ROOT_FORMAT)) + b"\n")
            temporary.rename(self._path)
        except BaseException:
            lock.close()
            temporary.unlink(missing_ok=True)
            raise
        self._lock = lock


@dataclass
class _File:
    """What a reader knows of one file."""

    offset: int = 0
    format: int | None = None
    """Format in its first line; None before that is read."""
    said: dict[str, Outcome] = field(default_factory=dict)
    """The newest line of each save."""


class OutcomeLogs:
    """The files of a run, as the other ranks read them; ``request`` is any of the run's."""

    def __init__(self, request: SaveRequest) -> None:
        self._folder = _folder(request.root)
        self._pattern = f"{request.save.run_label}.*.jsonl"
        self._files: dict[Path, _File] = {}

    def read(self) -> None:
        """Read what was added since the last call.

        Raises:
            OSError: the root cannot be read.
        """
        for path in list_uncached(self._folder, self._pattern):
            seen = self._files.setdefault(path, _File())
            try:
                with open_no_follow(path) as file:  # which asks an NFS server for its size
                    file.seek(seen.offset)
                    whole = file.read().rpartition(b"\n")[0]
            except OSError:
                continue  # such as removed by a later run
            if whole:
                self._take(path, seen, whole.split(b"\n"))
                seen.offset += len(whole) + 1

    def outcome(self, key: str) -> Outcome | None:
        """Return the outcome of a save by its request key; None if no rank 0 has written it."""
        said = [each.said[key] for each in self._files.values() if key in each.said]
        ended = [each for each in said if each.state in ("completed", "failed")]
        return ended[0] if ended else None

    def is_followed(self, key: str, age_s: float) -> bool:
        """Return whether a living rank 0 follows a save, or may still begin to.

        ``age_s`` is counted from when this process submitted the save.

        Raises:
            OSError: the root cannot be read.
        """
        announcing = [path for path, each in self._files.items() if key in each.said]
        if announcing:
            return any(map(is_locked, announcing))
        if age_s >= UNANNOUNCED_S:
            return False
        return not self._files or any(map(is_locked, self._files))

    @staticmethod
    def _take(path: Path, seen: _File, lines: list[bytes]) -> None:
        for line in lines:
            try:
                if seen.format is None:
                    seen.format = msgspec.json.decode(line, type=_Header).format
                    if seen.format != ROOT_FORMAT:
                        logger.warning(
                            "Not reading %s, which another release has written: this rank queries "
                            "the Prefect server itself. Install one release on all ranks",
                            path,
                        )
                    continue
                if seen.format != ROOT_FORMAT:
                    return
                read = msgspec.json.decode(line, type=_Line)
            except ValueError:
                continue  # truncated when its writer died
            seen.said.pop(read.key, None)
            seen.said[read.key] = Outcome(read.state, read.message, read.url)
            if len(seen.said) > _REMEMBERED:
                del seen.said[next(iter(seen.said))]


def _folder(root: str) -> Path:
    return Path(root) / PRIVATE_FOLDER / "outcomes"
