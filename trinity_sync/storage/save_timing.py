"""How long a save took: the stall of the training, and the phases from submission to commit.

The manifest keeps it, so a report needs no Prefect server. A manifest cannot contain the time of
its own write, so the commit phase ends right before it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity_sync.fs.records import Count, Seconds
from trinity_sync.layout import Kind

if TYPE_CHECKING:
    from trinity_sync.snapshot.save_id import SaveId
    from trinity_sync.storage.save import Written


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

    @property
    def bytes_per_s(self) -> float:
        """Bytes written per second of the write phase; 0 if nothing was written."""
        return self.nbytes / self.write_s if self.write_s else 0.0


def find_stalls(written: "Iterable[Written]") -> tuple[Stall, ...]:
    """Return the longest stall of each role, sorted by role."""
    longest: dict[str, Stall] = {}
    for file in written:
        if not file.submitted_at:  # of another save of the step
            continue
        stall = Stall(file.record.role, file.record.rank, file.stall_s)
        known = longest.get(stall.role)
        if known is None or stall.seconds > known.seconds:
            longest[stall.role] = stall
    return tuple(stall for _, stall in sorted(longest.items()))


def find_submission(written: "Iterable[Written]") -> float:
    """Return when the last rank submitted its images, in seconds since the epoch; 0 for none."""
    return max((file.submitted_at for file in written), default=0.0)


def measure_save(
    save: "SaveId",
    written: "Sequence[Written]",
    started_at: float,
    persisted_at: float,
    committed_at: float,
) -> SaveTiming:
    """Return how long a save took. All times are seconds since the epoch.

    ``started_at`` is when its flow run started, ``persisted_at`` when all files were durable; 0 if
    that is unknown. ``committed_at`` is when the manifest is written.
    """
    submitted_at = find_submission(written)
    own = [file for file in written if file.submitted_at]
    return SaveTiming(
        kind=save.kind,
        roles=save.roles,
        stalls=find_stalls(written),
        submitted_at=submitted_at or started_at or committed_at,
        # the clocks of two nodes may disagree
        queue_s=max(started_at - submitted_at, 0.0) if started_at and submitted_at else 0.0,
        write_s=max(persisted_at - started_at, 0.0),
        commit_s=max(committed_at - persisted_at, 0.0) if persisted_at else 0.0,
        nbytes=sum(file.record.nbytes for file in written if file.temporary),
        ranks=len({(file.record.role, file.record.rank) for file in own}),
        nodes=len({file.node for file in own}),
    )
