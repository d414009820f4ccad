"""A pinned view of one version: it can be neither changed nor removed while the view is open.

From memory, the images of all ranks are locked, and their notes seen to be of the very version,
before the first byte is copied; those of other nodes are private copies. From a checkpoint, the
step is leased. A version that cannot be pinned as a whole is not opened, so a reader never has
parts of two versions.
"""

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trinity_sync.errors import CommitError, WeightSyncError
from trinity_sync.fs.direct_io import digest_of_bytes
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.slot_reader import SlotReader, view_read_only
from trinity_sync.snapshot.version_tag import VersionTag
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import FileRecord
from trinity_sync.weights.object_store import Copy
from trinity_sync.weights.unshard import Slice, Whole, copy_whole, plan_of, whole_tensors
from trinity_sync.weights.version import Gone, Version

KNOWN_PLANS = 4
"""Structures of which a reader remembers the plan."""

Target = nn.Module | Mapping[str, torch.Tensor]
Fetch = Callable[[Sequence[int]], Sequence[Copy]]
"""Gets the images of these ranks from their nodes."""


@dataclass(frozen=True)
class VersionView:
    """The bytes of one version, valid within the block that returned it."""

    version: Version
    plan: tuple[Whole, ...]
    images: Sequence[torch.Tensor]
    dtype: torch.dtype | None = None
    """What floating-point tensors are rounded to as they are copied; None for what they are."""

    def tensors(
        self, slices: Mapping[str, Slice] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors on the CPU, in memory of their own, one after the other.

        Args:
            slices: what is wanted of some tensors, by name: (dimension, start, stop).
        """
        return whole_tensors(self.plan, self.images, slices or {}, self.dtype)

    def load_into(self, target: Target, slices: Mapping[str, Slice] | None = None) -> None:
        """Copy every tensor into the parameter or buffer of its name, in one copy.

        Args:
            target: a module, or tensors by name, on any device; each is to be filled.
            slices: as in `tensors`.

        Raises:
            WeightSyncError: names, shapes or dtypes differ, or a target is a DTensor or on the meta
                device; nothing was loaded.
        """
        named = target.state_dict() if isinstance(target, nn.Module) else target
        copy_whole(self.plan, self.images, named, slices or {}, self.dtype)


class VersionOpener:
    """Opens versions for one reader; keeps slots mapped and unsharding plans between them.

    Args:
        name: of the reader, for the lease.
        verify: compare the digests of a checkpoint's files, not their sizes alone.
        node: Ray node id (hex) of this process; without one, all images are taken to be here.
        dtype: see `VersionView`.
    """

    def __init__(
        self,
        name: str,
        *,
        verify: bool = False,
        node: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._node = node
        self._verify = verify
        self._slots: dict[str, SlotReader] = {}
        self._plans: OrderedDict[tuple[str, ...], tuple[Whole, ...]] = OrderedDict()

    @contextmanager
    def images(self, version: Version, fetch: Fetch) -> Iterator[VersionView]:
        """Hold a version in shared memory: what is on this node as it is, the rest as a copy.

        Raises:
            Gone: one of its images is overwritten, removed or out of reach.
            WeightSyncError: images are missing or do not make whole tensors.
        """
        refs = sorted(version.images, key=lambda ref: ref.rank)
        if not refs:
            raise WeightSyncError(
                f"{_what(version)} was given as a dict; get it by get_model_state_dict, or have "
                "the trainer upload it"
            )
        notes: dict[int, VersionTag] = {}
        memories: dict[int, torch.Tensor] = {}
        away = [ref.rank for ref in refs if self._node not in (None, ref.node)]
        with ExitStack() as locks:
            for ref in refs:
                if ref.rank in away:
                    continue
                slot = self._slots.setdefault(ref.slot, SlotReader(Path(ref.slot)))
                said = slot.try_lock(ref.image)
                if said is None:
                    raise Gone(f"{_what(version)}: the image in {ref.slot} was overwritten")
                locks.callback(slot.unlock)
                notes[ref.rank], memories[ref.rank] = said, slot.memory[: ref.nbytes]
            if away:
                for rank, (said, content) in zip(away, fetch(away), strict=True):
                    notes[rank], memories[rank] = said, view_read_only(memoryview(content))
            for rank, ref in enumerate(refs):
                said = notes[ref.rank]
                found = (said.run, said.step, said.role, said.rank)
                if found != (version.run, version.step, version.role, rank):
                    raise WeightSyncError(
                        f"{_what(version)}: {ref.slot} holds rank {said.rank} of {said.role} at "
                        f"step {said.step}; have the trainer upload the version again"
                    )
                if said.world_size != len(refs):
                    raise WeightSyncError(
                        f"{_what(version)} names images of {len(refs)} of {said.world_size} ranks"
                    )
            images = [memories[rank] for rank in range(len(refs))]
            layouts = [notes[rank].layout for rank in range(len(refs))]
            yield VersionView(version, self.plan(images, layouts), images, self._dtype)

    @contextmanager
    def checkpoint(self, version: Version) -> Iterator[VersionView]:
        """Hold a committed step.

        Raises:
            Gone: the step is not committed (any more), or corrupted.
            WeightSyncError: it has no weights of the role.
        """
        root, step = Path(version.root), version.step
        with ExitStack() as claim:
            try:
                manifest = claim.enter_context(lease_to_read(root, step, self._name))
            except CommitError as error:
                raise Gone(f"{_what(version)}: {error}") from error
            if manifest.run != version.run:
                raise Gone(f"{_what(version)}: another run has replaced the step")
            records = sorted(
                (
                    record
                    for record in manifest.files
                    if (record.role, record.component) == (version.role, "model")
                    and record.is_shard
                ),
                key=lambda record: record.rank,
            )
            if [record.rank for record in records] != list(range(max(len(records), 1))):
                raise WeightSyncError(f"{_what(version)} has no shards of role {version.role}")
            try:
                mapped = [_mapped(step_folder(root, step) / record.path) for record in records]
                require_unreplaced(root, manifest)  # by now they are mapped, and stay as they are
            except (CommitError, FileNotFoundError) as error:
                raise Gone(f"{_what(version)}: {error}") from error
            if self._verify:
                for content, record in zip(mapped, records, strict=True):
                    _check(content, step_folder(root, step) / record.path, record)
            memories = [view_read_only(content) for content in mapped]
            yield VersionView(version, self.plan(memories, None), memories, self._dtype)

    def close(self) -> None:
        """Let go of the slots."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def plan(
        self, memories: Sequence[torch.Tensor], layouts: Sequence[str] | None
    ) -> tuple[Whole, ...]:
        """The plan of images, made once for each structure where their layouts are known."""
        key = tuple(layouts or ())
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        plan = plan_of([memory.numpy().data for memory in memories])
        if key:
            self._plans[key] = plan
            if len(self._plans) > KNOWN_PLANS:
                self._plans.popitem(last=False)
        return plan


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _check(content: memoryview, path: Path, record: FileRecord) -> None:
    if digest_of_bytes(content) != record.digest:
        raise WeightSyncError(
            f"{path} is corrupted: it has not the digest that the manifest names; restore it from "
            "a copy, or remove the step"
        )


def _what(version: Version) -> str:
    return f"version {version.step} (run {version.run}) of {version.role} in {version.root}"
