"""Health of the values in a step, as its manifest tells it.

The record of a shard has what was found in it as it was written (`tensors.health`), and since which
step its bytes are the same. A step is unhealthy if values of it are not finite; a part that has not
changed is an alarm, and as good to load as it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING, Annotated

import msgspec

from trinity_sync.fs.records import Count
from trinity_sync.storage.placement import describe_ranks

if TYPE_CHECKING:
    from trinity_sync.storage.manifest import FileRecord

COMPARED = ("model", "optim", "dcp")
"""Components that a training changes from step to step."""
NAMED = 3
"""Number of tensors that are named."""

Magnitude = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class FileHealth:
    """The floating-point values of a file."""

    tensors: Count
    """Number of tensors that were looked at."""
    nonfinite: Count
    """Number of values that are NaN or infinite."""
    norm: Magnitude
    """L2 norm of the finite values. Of 16-bit tensors of more than 512 KiB it is estimated."""
    largest: Magnitude
    """Largest magnitude of the finite values."""
    names: tuple[str, ...] = ()
    """The first tensors with values that are not finite."""


@dataclass(frozen=True)
class ComponentHealth:
    """The values of a component of a role, of all ranks whose files were looked at."""

    role: str
    component: str
    tensors: int
    """Number of tensors that were looked at; 0 if the format of the files is not looked into."""
    nonfinite: int
    """Number of values that are NaN or infinite."""
    norm: float
    """L2 norm of the finite values."""
    largest: float
    """Largest magnitude of the finite values."""
    wrong: str
    """Which values are NaN or infinite: how many, of which ranks and first tensors; empty if all
    are finite."""
    unchanged_since: int | None
    """Earlier step whose files have the same bytes on all ranks; None if a file has changed."""

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        since = self.unchanged_since
        is_same = f"{self.role}/{self.component} has not changed since step {since}"
        return [*filter(None, [self.wrong, is_same * (since is not None)])]


def describe_nonfinite(files: "Sequence[tuple[FileRecord, FileHealth]]") -> str:
    """Return which values of the files of a component are not finite; empty if all are finite."""
    bad = [(file, health) for file, health in files if health.nonfinite]
    if not bad:
        return ""
    count = sum(health.nonfinite for _, health in bad)
    ranks = describe_ranks([file.rank for file, _ in bad])
    names = [*dict.fromkeys(name for _, health in bad for name in health.names)]
    return (
        f"{count:,} non-finite value{'s' * (count > 1)} in {bad[0][0].role}/{bad[0][0].component} "
        f"of {ranks} ({', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)})"
    )


def sum_up_health(files: "Iterable[FileRecord]") -> tuple[ComponentHealth, ...]:
    """Return the health of each component of each role, as far as anything is known of it."""
    groups: dict[tuple[str, str], list[FileRecord]] = {}
    for file in files:
        if file.component in COMPARED:
            groups.setdefault((file.role, file.component), []).append(file)
    found = (_sum_up(*group, files) for group, files in sorted(groups.items()))
    return tuple(each for each in found if each.tensors or each.problems)


def _sum_up(role: str, component: str, files: "Sequence[FileRecord]") -> ComponentHealth:
    seen = [(file, file.health) for file in files if file.health]
    since = [-1 if file.unchanged_since is None else file.unchanged_since for file in files]
    return ComponentHealth(
        role,
        component,
        tensors=sum(health.tensors for _, health in seen),
        nonfinite=sum(health.nonfinite for _, health in seen),
        norm=hypot(*(health.norm for _, health in seen)),
        largest=max((health.largest for _, health in seen), default=0.0),
        wrong=describe_nonfinite(seen),
        unchanged_since=None if -1 in since else max(since),
    )
