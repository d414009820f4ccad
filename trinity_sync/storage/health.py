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
DISTCP = ".distcp"
"""Suffix of a rank's file of DCP or Megatron, which only they read."""
NAMED = 3

Magnitude = Annotated[float, msgspec.Meta(ge=0)]


def is_looked_into(component: str, path: str) -> bool:
    """Return whether the values of a file are looked at."""
    return component in COMPARED and path.endswith((".pt", DISTCP))


@dataclass(frozen=True)
class FileHealth:
    """The floating-point values of a file."""

    tensors: Count
    """Number of tensors that were looked at."""
    nonfinite: Count
    """Number of values that are NaN or infinite."""
    norm: Magnitude
    """L2 norm of the finite values; of tensors of more than 512 KiB, it is estimated."""
    largest: Magnitude
    """Largest magnitude of the finite values."""
    names: tuple[str, ...]
    """The first tensors with values that are not finite; in a file of DCP, where they start."""


@dataclass(frozen=True)
class ComponentHealth(FileHealth):
    """The values of a component of a role, of all ranks whose files were looked at."""

    role: str
    """Folder below the step's folder."""
    component: str
    """``model``, ``optim`` or ``dcp``."""
    nonfinite_ranks: tuple[int, ...]
    """Ranks with values that are not finite."""
    unchanged_since: int | None
    """Earlier step whose files have the same content on all ranks; None if a file has changed."""

    @property
    def wrong(self) -> str:
        """Which values are not finite, in words; empty if all are finite."""
        if not self.nonfinite:
            return ""
        values = f"{self.nonfinite:,} non-finite value{'s' * (self.nonfinite > 1)}"
        ranks, names = describe_ranks(self.nonfinite_ranks), ", ".join(self.names)
        return f"{values} in {self.role}/{self.component} of {ranks} ({names})"

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        since = self.unchanged_since
        is_same = f"{self.role}/{self.component} has not changed since step {since}"
        return [*filter(None, [self.wrong, is_same * (since is not None)])]


def sum_up_health(files: "Iterable[FileRecord]") -> tuple[ComponentHealth, ...]:
    """Return the health of each component of each role, as far as anything is known of it."""
    groups: dict[tuple[str, str], list[FileRecord]] = {}
    for file in files:
        if file.component in COMPARED:
            groups.setdefault((file.role, file.component), []).append(file)
    found = (_sum_up(*group, files) for group, files in sorted(groups.items()))
    return tuple(each for each in found if each.tensors or each.problems)


def _sum_up(role: str, component: str, files: "Sequence[FileRecord]") -> ComponentHealth:
    seen = [file.health for file in files if file.health]
    since = [-1 if file.unchanged_since is None else file.unchanged_since for file in files]
    return ComponentHealth(
        sum(each.tensors for each in seen),
        sum(each.nonfinite for each in seen),
        hypot(*(each.norm for each in seen)),
        max((each.largest for each in seen), default=0.0),
        tuple(dict.fromkeys(name for each in seen for name in each.names))[:NAMED],
        role,
        component,
        tuple(file.rank for file in files if file.health and file.health.nonfinite),
        unchanged_since=None if -1 in since else max(since),
    )
