"""The explorer's side: hear of a new version, and have it in one's own parameters.

::

    reader = WeightReader(synchronizer, name="explorer-0")
    while await reader.wait_newer() is not None:
        reader.load_into(model)

A reader takes what is newest when it begins to copy. If the trainer has overwritten a version
meanwhile, that is a newer one, or the commit of the same step; never parts of two, and never an
older one than it had. The trainer does not notice.

Which versions there are says a registry: the files of this node's spool and of the root
(``file_registry``), which needs no Ray, or the job's Synchronizer (``actor_registry``), by which
images on other nodes come through Ray's object store, once for all readers of a node.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.committed import newest_version
from trinity_sync.weights.delta import Array
from trinity_sync.weights.delta_cache import Base
from trinity_sync.weights.file_registry import FileRegistry
from trinity_sync.weights.object_store import Copy
from trinity_sync.weights.ray_cluster import in_ray_cluster
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.unshard import Slice
from trinity_sync.weights.version import Gone, Version
from trinity_sync.weights.version_view import Target, VersionOpener, VersionView

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 0.5
"""Between two looks for a version that can be held."""


class Versions(Protocol):
    """A version registry, as a reader asks it."""

    node: str | None
    """Ray node id (hex) of the reader; None where all images are on its node."""

    def latest(self) -> Version | None:
        """The newest version that can be read."""

    async def wait_newer(
        self, than: int, timeout_s: float | None, run: int | None
    ) -> Version | None:
        """The same once it is beyond step ``than`` of ``run``; None at the time-out."""

    def serving(self, reader: str, step: int, run: int) -> None:
        """The reader serves this version now."""

    def copies(self, version: Version, ranks: Sequence[int], timeout_s: float) -> Sequence[Copy]:
        """The images of these ranks, which are on other nodes; see `copies.fetch`."""

    def deltas(
        self, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
    ) -> Sequence[Array]:
        """What turns the images of ``base`` into the version's; see `copies.fetch_deltas`."""


class WeightReader:
    """Reads versions for one explorer.

    Args:
        synchronizer: the job's, a Ray actor, or anything with the methods of `Versions`. By default
            that of the job at ``root`` if this process has joined its Ray cluster; otherwise the
            files of this node's spool and of the root are read, and Ray is not needed.
        root: of the job, where no Synchronizer is given.
        name: of this reader, unique in the job; shown to people, and the holder of its leases.
        deltas: keep a copy of the weights, and get what changed in them where that can be had, the
            whole version else; see ``base``.
        dtype: round floating-point tensors to it as they are copied, e.g. to ``torch.bfloat16``
            where the trainer has ``float32`` masters; deltas are of what is left then. By default
            they are what the trainer has, and all that they are loaded into has to be that.
        verify: compare the digests of what is read from disk, not the sizes alone.
        patience_s: seconds to look for a version that can be held before giving up.

    Raises:
        ConfigError: there is neither ``root`` nor a Synchronizer.
    """

    def __init__(
        self,
        synchronizer: Any = None,
        *,
        name: str,
        root: str | Path | None = None,
        deltas: bool = False,
        dtype: torch.dtype | None = None,
        verify: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        self._versions = _registry(name, synchronizer, root)
        self._name = name
        self._opener = VersionOpener(name, verify=verify, node=self._versions.node, dtype=dtype)
        self._base = Base(rounding=dtype is torch.bfloat16) if deltas else None
        self._patience_s = patience_s
        self.version: Version | None = None
        """What was read last."""

    @property
    def delta_bytes(self) -> int | None:
        """Bytes of the deltas that made what was read last from memory; None if it came whole."""
        return self._base.delta_bytes if self._base else None

    async def wait_newer(
        self, than: int | None = None, timeout_s: float | None = None
    ) -> Version | None:
        """Wait for a version to read that is newer than the last; None at the time-out.

        Args:
            than: a step that it has to be beyond instead.
            timeout_s: seconds; without end by default.

        Raises:
            WeightSyncError: the Synchronizer was stopped, or lost.
        """
        at = self.version
        beyond = than if than is not None else at.step if at else -1
        return await self._versions.wait_newer(beyond, timeout_s, at.run if at else None)

    @contextmanager
    def hold(self, version: Version | None = None) -> Iterator[VersionView]:
        """Hold a version, so that it stays what it is within the block.

        Args:
            version: the one that is wanted, by default the newest that can be read. If it is gone,
                a newer one is held; ``held.version`` says which.

        Raises:
            WeightSyncError: no version can be had within ``patience_s`` seconds, what there is
                makes no whole tensors, or the one that is wanted cannot be read.
        """
        deadline = time.monotonic() + self._patience_s
        wanted = version or self._versions.latest()
        trouble, pause_s = "nothing was published", 0.005
        while True:
            for candidate in self._candidates(wanted):
                with ExitStack() as opened:
                    try:
                        held = opened.enter_context(self._open(candidate, deadline))
                    except Gone as error:
                        trouble = str(error)
                        continue
                    yield held
                self.version = held.version
                return
            if time.monotonic() >= deadline:
                raise WeightSyncError(
                    f"reader {self._name} found no version that it can read within "
                    f"{self._patience_s:g} s ({trouble}). Does the trainer run, and does this "
                    "process see its root and, on the trainer's node, its shared memory?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            wanted = self._versions.latest()

    def iter_weights(
        self,
        version: Version | None = None,
        *,
        slices: Mapping[str, Slice] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names, as Hugging Face's, and whole tensors of a version; tied ones once.

        They are on the CPU and in memory of their own. Args and errors are those of `hold`, and of
        `VersionView.tensors`; ``reader.version`` says which version it was, after the last one.
        """
        with self.hold(version) as held:
            yield from held.tensors(slices)
        self._versions.serving(self._name, held.version.step, held.version.run)

    def load_into(
        self,
        target: Target,
        version: Version | None = None,
        *,
        slices: Mapping[str, Slice] | None = None,
    ) -> int:
        """Copy a version into a module, or a dict of tensors; returns the step that it has now.

        Args and errors are those of `hold`, and of `VersionView.load_into`. Nothing else may
        use the target meanwhile.
        """
        with self.hold(version) as held:
            held.load_into(target, slices)
        self._versions.serving(self._name, held.version.step, held.version.run)
        return held.version.step

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._opener.close()

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _candidates(self, wanted: Version | None) -> Iterator[Version]:
        """Where to look, best first, each asked for when the one before is gone."""
        at = self.version
        if wanted and (at is None or _order(wanted) >= _order(at)):
            yield wanted
        latest = self._versions.latest()
        least = max((_order(v) for v in (wanted, at) if v), default=(0, 0))
        if latest and latest != wanted and _order(latest) >= least:
            yield latest
        if known := latest or wanted or at:
            committed = newest_version(known.root, known.role)
            if committed and _order(committed) >= least:
                yield committed

    def _open(self, version: Version, deadline: float) -> AbstractContextManager[VersionView]:
        if version.source == "checkpoint":
            return self._opener.checkpoint(version)
        if version.source == "memory":

            def left_s() -> float:
                return max(0.0, deadline - time.monotonic())

            whole = self._opener.images(
                version, lambda ranks: self._versions.copies(version, ranks, left_s())
            )
            if self._base is None:
                return whole
            return self._base.images(
                version,
                whole,
                lambda base, to, spans: self._versions.deltas(base, to, spans, left_s() / 2),
            )
        raise WeightSyncError(
            f"version {version.step} is broadcast ({version.source}); join the broadcast, or set "
            "the trainer's sync_method to memory or checkpoint"
        )


def _registry(name: str, synchronizer: Any, root: str | Path | None) -> Versions:
    """The registry that a reader asks."""
    if synchronizer is None and in_ray_cluster():
        from trinity_sync.weights.synchronizer import Synchronizer, find_synchronizer

        synchronizer = find_synchronizer(root) if root else Synchronizer.get_actor()
    if synchronizer is None:
        if root is None:
            raise ConfigError(
                f"reader {name} has to know the job; pass root, the job's folder, or a Synchronizer"
            )
        logger.info("reader %s finds versions of %s by files, without a Synchronizer", name, root)
        return FileRegistry(root)
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(synchronizer, ray.actor.ActorHandle):
        from trinity_sync.weights.actor_registry import ActorRegistry

        return ActorRegistry(synchronizer, root)
    found: Versions = synchronizer
    return found


def _order(version: Version) -> tuple[int, int]:
    return (version.run, version.step)
