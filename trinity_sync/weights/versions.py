"""Versions of a job's weights: where a reader finds them, and which version each reader serves.

Pure state: no Ray, no asyncio, no clock (times come in as ``now``, seconds since the epoch), so
every rule can be tested as a table. Two rules hold in any order of calls:

- versions are ordered by (run, step), and the newest never moves backwards;
- a version that a later run superseded, by resuming from an earlier step, is removed and is not
  recorded again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.snapshot.identity import is_of_other_run, read_identity
from trinity_sync.snapshot.ticket import VersionTag
from trinity_sync.storage.runs import (
    Run,
    find_shared_step,
    find_superseding_run,
    is_run_gone,
    list_runs,
)

Source = Literal["memory", "checkpoint", "nccl"]
"""Trinity's ``sync_method``: images in the trainer's spool, a committed step, or a broadcast."""

ImageCopy = tuple[VersionTag, Any]
"""Version tag and bytes of an image, a read-only ``uint8`` array of shape ``[nbytes]``."""


class VersionUnavailableError(WeightSyncError):
    """A version that cannot be read any longer: an image was overwritten, or the step removed."""


@dataclass(frozen=True)
class ImageRef:
    """Location of one rank's shard of the weights: a ``.pt`` file in a slot of a node's spool."""

    node: str
    """Ray node id (hex) of the node whose shared memory holds it."""
    slot: str
    """Absolute path of the slot there."""
    image: str
    """Random name of the image; the slot's version tag has it while the bytes are unchanged."""
    rank: int
    nbytes: int


@dataclass(frozen=True)
class Version:
    """One version of the weights, and where a reader finds it."""

    step: int
    """The trainer's step."""
    run: int
    """Number of the run that made it."""
    source: Source
    root: str
    role: str = "actor"
    images: tuple[ImageRef, ...] = ()
    """The images of all ranks, by rank, if the source is memory."""
    identity: str = ""
    """Identity of the job, see `snapshot.identity`; empty if it is unknown."""
    run_key: str = ""
    """Key of the run; empty if it is unknown."""

    @property
    def readable(self) -> bool:
        """Whether a reader can open it: not a broadcast, nor a dict given to the Synchronizer."""
        return self.source == "checkpoint" or bool(self.images)

    def is_of_other_job(self, other: "Version") -> bool:
        """Return whether the root was recreated between two versions, so that steps say nothing.

        A root that was restored has given the number of a run to another one.
        """
        lost = self.run == other.run and is_of_other_run(self, other)
        return lost or len({self.identity, other.identity} - {""}) > 1

    def is_older_than(self, other: "Version") -> bool:
        """Return whether another version of the same job is newer."""
        is_less = (self.run, self.step) < (other.run, other.step)
        return is_less and not self.is_of_other_job(other)


def make_shard(
    tag: VersionTag, slot: Path, root: str | Path, identity: str, node: str = ""
) -> Version:
    """Return a version with the image of one rank, for `VersionRegistry.add_image`."""
    image = ImageRef(node, str(slot), tag.image, tag.rank, tag.nbytes)
    known = {"identity": identity, "run_key": tag.run_key}
    return Version(tag.step, tag.run, "memory", str(root), tag.role, (image,), **known)


class Registry(ABC):
    """The version registry, as readers use it."""

    node: str | None = None
    """Ray node id (hex) of the reader; None if all images are on its node."""

    @abstractmethod
    def latest(self) -> Version | None:
        """Return the newest version that can be read; None if there is none."""

    @abstractmethod
    async def wait_newer(self, than: int | Version, timeout_s: float | None) -> Version | None:
        """Wait for a version that can be read, and is newer as `VersionRegistry.newer` says.

        Return None at the time-out; a ``timeout_s`` of None waits without limit.
        """

    def set_serving(self, reader: str, step: int, run: int) -> None:  # noqa: B027
        """Record the version that a reader serves; by default there is no record."""

    def fetch_images(
        self, version: Version, ranks: Sequence[int], timeout_s: float
    ) -> Sequence[ImageCopy]:
        """Fetch images that are on other nodes, of the newest version in memory.

        They are in the order of ``ranks``; ``timeout_s`` is for all of them.

        Raises:
            VersionUnavailableError: an image cannot be fetched; by default.
        """
        raise VersionUnavailableError(
            f"images of ranks {list(ranks)} of version {version.step} are on other nodes; to read "
            "them, join the Ray cluster of the job's Synchronizer"
        )


HISTORY = 8
"""Versions that are kept for readers to fall back to, besides the newest of each source."""
MOST_READERS = 1024
"""Readers that are kept; beyond that, the least recently seen are removed."""
PREFERENCE: tuple[Source, ...] = ("memory", "checkpoint", "nccl")
"""Order of one step's sources: shared memory is fastest, a broadcast cannot be read afterwards."""

Key = tuple[int, int]
"""(run, step): a later run counts as newer, because it resumed from an earlier step on purpose."""


@dataclass(frozen=True)
class Reader:
    """The version that one reader serves, compared with the newest."""

    name: str
    step: int
    run: int
    since: float
    """Seconds since the epoch at which it began to serve that step."""
    behind: int
    """Steps to the newest version, from the one served or from the step that superseded it."""
    stale_s: float
    """Seconds since a newer version appeared; 0 if there is none."""


@dataclass(frozen=True)
class _Serving:
    step: int
    run: int
    since: float
    outdated: float | None
    """Seconds since the epoch at which a newer version appeared; None if there is none."""


@dataclass(frozen=True)
class RegistryState:
    """What a restart has to know of a registry."""

    runs: tuple[Run, ...] = ()
    versions: tuple[tuple[Version, float], ...] = ()
    """Versions, and when each step was known, in seconds since the epoch."""
    serving: dict[str, _Serving] = field(default_factory=dict)


class VersionRegistry:
    """Versions, runs and readers of one job; see the module."""

    def __init__(self, state: RegistryState = RegistryState()) -> None:
        self.runs: dict[int, Run] = {}
        self.images: dict[Key, dict[int, ImageRef]] = {}
        """Images by rank, of versions in memory that are not recorded yet."""
        self._versions: dict[Key, dict[Source, Version]] = {}
        self._known_at: dict[Key, float] = {}
        self._serving: dict[str, _Serving] = {}
        """By name, the least recently seen first."""
        self.add_runs(state.runs)
        for version, known_at in state.versions:
            self.record(version, known_at)
        self._serving |= state.serving

    @property
    def state(self) -> RegistryState:
        """State of which a registry can be made that equals this one."""
        versions = (
            (version, self._known_at[key])
            for key, sources in sorted(self._versions.items())
            for version in sources.values()
        )
        return RegistryState(tuple(self.runs.values()), tuple(versions), dict(self._serving))

    # Versions

    def add_image(self, shard: Version, world_size: int) -> Version | None:
        """Add the image of one rank to a version; return the version once it has those of all.

        A version that stays incomplete is dropped when a newer one in memory is recorded.
        """
        images = self.images.setdefault((shard.run, shard.step), {})
        images.update({ref.rank: ref for ref in shard.images})
        if images.keys() != set(range(world_size)):
            return None
        return replace(shard, images=tuple(images[rank] for rank in range(world_size)))

    def record(self, version: Version, now: float) -> bool:
        """Record a version, or another source of it; return whether it is the newest now.

        A superseded version is ignored.
        """
        key = (version.run, version.step)
        if self.is_superseded(*key):
            return False
        self._versions.setdefault(key, {})[version.source] = version
        self._known_at.setdefault(key, now)
        if version.source == "memory":
            self.images = {other: found for other, found in self.images.items() if other > key}
        self._remove_old()
        for name, serving in self._serving.items():
            if serving.outdated is None and (serving.run, serving.step) < key:
                self._serving[name] = replace(serving, outdated=now)
        return key == max(self._versions)

    def add_runs(self, runs: Iterable[Run]) -> bool:
        """Add runs, remove the versions that they supersede, and return whether any was new.

        Known runs that are not in ``runs`` stay.
        """
        known = len(self.runs)
        self.runs |= {run.number: run for run in runs}
        if len(self.runs) == known:
            return False
        for key in [key for key in self._versions if self.is_superseded(*key)]:
            self._remove(key)
        return True

    def is_superseded(self, run: int, step: int) -> bool:
        """Return whether a later run superseded a step of ``run``."""
        return find_superseding_run(self.runs.values(), run, step) is not None

    def newest(self, source: Source | None = None, *, readable: bool = False) -> Version | None:
        """Return the newest version, by default of the best source; None if there is none."""
        for _, found in sorted(self._versions.items(), reverse=True):
            for each in (source,) if source else PREFERENCE:
                if each in found and (found[each].readable or not readable):
                    return found[each]
        return None

    def find(self, step: int, source: Source) -> Version | None:
        """Return the version of a step, of the newest run that has it; None if unknown."""
        keys = [key for key, found in self._versions.items() if key[1] == step and source in found]
        return self._versions[max(keys)][source] if keys else None

    def newer(self, than: int | Version, *, readable: bool = False) -> Version | None:
        """Return the newest version if it is newer than a version or a step, otherwise None.

        Than a version, a later run and another job, which is in the root now, are newer whatever
        the step, and all are newer than a superseded one or one of a run that the root has lost.
        Than a step of an unknown run, the newest version is newer if it is beyond the step; also
        below it, if the newest run made it: that run has not reached the step, so an earlier,
        superseded run made it.
        """
        newest = self.newest(readable=readable)
        if newest is None:
            return None
        if isinstance(than, Version):
            is_other = than.is_of_other_job(newest) or than.run > self.run
            is_newer = than.is_older_than(newest) or is_other
            is_newer = is_newer or self.is_superseded(than.run, than.step)
        else:
            resumed = newest.run == self.run > 1
            is_newer = newest.step > than or (resumed and newest.step < than)
        return newest if is_newer else None

    @property
    def run(self) -> int:
        """Number of the newest run; 1 if none is known."""
        return max([1, *self.runs, *(run for run, _ in self._versions)])

    # Readers

    def set_serving(self, reader: str, step: int, now: float, run: int) -> None:
        """Record the version that a reader serves."""
        serving = self._serving.pop(reader, None)
        if serving is None or (serving.run, serving.step) != (run, step):
            newer_at = [at for key, at in self._known_at.items() if key > (run, step)]
            serving = _Serving(step, run, now, outdated=min(newer_at, default=None))
        self._serving[reader] = serving
        if len(self._serving) > MOST_READERS:
            del self._serving[next(iter(self._serving))]

    def readers(self, now: float) -> tuple[Reader, ...]:
        """Return all readers, sorted by name; ``now`` in seconds since the epoch."""
        newest = max(self._versions, default=None)
        found = []
        for name, serving in sorted(self._serving.items()):
            later = find_superseding_run(self.runs.values(), serving.run, serving.step)
            common = min(serving.step, later.resumed_from) if later else serving.step
            behind = max(0, newest[1] - common) if newest else 0
            stale_s = 0.0 if serving.outdated is None else max(0.0, now - serving.outdated)
            found.append(Reader(name, serving.step, serving.run, serving.since, behind, stale_s))
        return tuple(found)

    def _remove_old(self) -> None:
        best = (self.newest(source) for source in PREFERENCE)
        keep = {(version.run, version.step) for version in best if version}
        keep |= set(sorted(self._versions)[-HISTORY:])
        for key in self._versions.keys() - keep:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        del self._versions[key], self._known_at[key]


@dataclass(frozen=True)
class RolloutGate:
    """Accepts rollouts of weights that are at most ``max_lag`` trainer steps old.

    Args:
        max_lag: largest number of steps between rollout and training; 0 is on-policy.

    Raises:
        ConfigError: ``max_lag`` is negative.
    """

    max_lag: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ConfigError(f"max_lag {self.max_lag} would let no rollout pass; 0 is on-policy")

    def accepts(
        self, made_by: int | Version, trainer_step: int, *, resumed_at: int | None = None
    ) -> bool:
        """Return whether to train at ``trainer_step`` on a rollout.

        Args:
            made_by: version of the weights that generated it, or their step alone. Weights beyond
                the step that a later run resumed from count as being of that step; those that the
                newest run does not continue are refused. The root's runs are read for a version.
            trainer_step: current step of the trainer. A step beyond it is refused.
            resumed_at: step that training resumed from, for a rollout of the run before of which
                only the step is known.

        Raises:
            ConfigError: the root of the version is not seen here.
            CommitError, FormatError: a run file of the root is torn, or of another release.
        """
        shared: int | None = None
        if isinstance(made_by, Version):
            runs, identity = list_runs(made_by.root), read_identity(made_by.root)
            if not runs:
                raise ConfigError(f"{made_by.root} has no runs here; the trainer has to see it")
            is_here = made_by.identity in ("", identity)
            if is_here and not is_run_gone(runs, made_by.run, made_by.run_key):
                shared = find_shared_step(runs, made_by.run, made_by.step)
        else:
            shared = made_by if resumed_at is None else min(made_by, resumed_at)
        return shared is not None and 0 <= trainer_step - shared <= self.max_lag

    def select_tokens(
        self, versions: Sequence[tuple[int, int, int]], trainer_step: int
    ) -> list[bool]:
        """Return which tokens of a rollout to train on at ``trainer_step``, in their order.

        Args:
            versions: as `RolloutLedger.finish` takes them: steps of the weights, first and last
                token of each.
            trainer_step: current step of the trainer.
        """
        return [
            accepted
            for step, first, last in versions
            for accepted in [self.accepts(step, trainer_step)] * (last - first + 1)
        ]
