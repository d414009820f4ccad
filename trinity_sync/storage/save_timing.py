"""How long a save took: the stall of the training, and the phases from submission to commit.

The manifest keeps it, so a report needs no Prefect server. A manifest cannot contain the time of
its own write, so the commit phase ends right before it.

``root/.trinity_sync/saves.jsonl`` has a line for each committed save, also of steps removed since,
and for each removal. Retention removes manifests; the log keeps what a report needs to show that
saves become slower, and the disk that they used. It is best effort: a crash may lose its last line.
It also tells a retry that its step was removed.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trinity_sync.errors import RemovedStepError
from trinity_sync.fs.atomic import open_to_append, read_file, replace_file
from trinity_sync.fs.records import Count, Seconds, decode_lines
from trinity_sync.layout import PRIVATE_FOLDER, Kind
from trinity_sync.snapshot.identity import SaveId

if TYPE_CHECKING:
    from trinity_sync.storage.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True)
class Stall:
    """The rank of a role whose training thread a save stalled longest."""

    role: str
    rank: Count
    seconds: Seconds


@dataclass(frozen=True)
class SaveTiming:
    """How long one save of a step took. Durations between two nodes depend on their clocks."""

    kind: Kind
    roles: tuple[str, ...]
    stalls: tuple[Stall, ...]
    """One for each role; none if only save functions wrote files."""
    submitted_at: Seconds
    """When the last rank had sealed its images, in seconds since the epoch."""
    queue_s: Seconds
    """Seconds from then until the flow run started."""
    write_s: Seconds
    """Seconds until all files were durable."""
    commit_s: Seconds
    """Seconds until the manifest was written."""
    nbytes: Count
    """Bytes that this save wrote, without files of an earlier save of the step."""
    ranks: Count
    nodes: Count
    by_saver: bool = False
    """Whether the saver has committed it, and no flow run."""

    @property
    def longest_stall(self) -> Stall | None:
        """The longest stall of all roles; None if there is none."""
        return max(self.stalls, key=lambda stall: stall.seconds, default=None)

    @property
    def total_s(self) -> float:
        """Seconds from submission to commit."""
        return self.queue_s + self.write_s + self.commit_s

    def __str__(self) -> str:
        stalls = ", ".join(
            f"{each.role} {1e3 * each.seconds:.0f} ms (slowest rank {each.rank})"
            for each in self.stalls
        )
        return (
            f"trainer stall {stalls or 'unknown'}; {self.total_s:.2f} s from submission to commit "
            f"= queue {self.queue_s:.2f} + write {self.write_s:.2f} + commit {self.commit_s:.2f}"
        )


MAX_BYTES = 4 << 20
"""Size in bytes beyond which the older half of the log is dropped."""


@dataclass(frozen=True)
class LoggedSave:
    """A committed save."""

    run: Count
    step: Count
    committed_at: Seconds
    """Seconds since the epoch."""
    timing: SaveTiming


@dataclass(frozen=True)
class LoggedRemoval:
    """A step that retention has removed or a rewind has quarantined."""

    run: Count
    step: Count
    removed_at: Seconds
    """Seconds since the epoch."""


def append_save(root: str | Path, manifest: "Manifest") -> None:
    """Log the newest save of a manifest. Call it under the commit lock.

    Raises:
        OSError: the log cannot be written.
    """
    timing = manifest.timings[-1]
    _append(root, LoggedSave(manifest.run, manifest.step, manifest.committed_at, timing))


def append_removal(root: str | Path, run: int, step: int, now: float) -> None:
    """Log a removal; a failure is ignored. Call it under the commit lock."""
    with suppress(OSError):
        _append(root, LoggedRemoval(run, step, now))


def _append(root: str | Path, entry: LoggedSave | LoggedRemoval) -> None:
    path, line = _path(root), msgspec.json.encode(entry) + b"\n"
    with open_to_append(path) as file:
        if file.tell() <= MAX_BYTES:
            file.write(line)
            return
        file.seek(0)
        lines = [*file, line]
    replace_file(path, b"".join(lines[len(lines) // 2 :]), sync=False)


def read_saves(root: str | Path) -> Sequence[LoggedSave]:
    """Return the logged saves, oldest first, each once; lines that are torn are skipped."""
    found: dict[tuple[object, ...], LoggedSave] = {}
    for each in _read(root, LoggedSave):
        # a flow run that is retried after its commit logs the save again
        save = (each.run, each.step, each.timing.kind, each.timing.roles)
        found.setdefault(save, each)
    return list(found.values())


def read_removals(root: str | Path) -> Sequence[LoggedRemoval]:
    """Return the logged removals, oldest first."""
    return list(_read(root, LoggedRemoval))


def _read(root: str | Path, kind: type[T]) -> Iterator[T]:
    with suppress(FileNotFoundError, ValueError):
        yield from decode_lines(kind, read_file(_path(root)))


def refuse_removed(save: SaveId) -> None:
    """Refuse to wait for the images of a save that was committed and whose step is gone.

    Call it if neither images nor a manifest of the save are left.

    Raises:
        RemovedStepError: the log has it.
    """
    for each in read_saves(save.root):
        logged = (each.run, each.step, each.timing.kind, each.timing.roles)
        if logged == (save.run, save.step, save.kind, save.roles):
            at = datetime.fromtimestamp(each.committed_at, UTC)
            raise RemovedStepError(
                f"{save} was committed at {at:%Y-%m-%d %H:%M:%S} UTC, and the step has been "
                "removed or replaced since, so nothing is left to save. Do not retry it."
            )


def _path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "saves.jsonl"
