"""A pinned view of one version, which cannot be changed or removed while the view is open.

From memory: the images of all ranks are locked, and their version tags compared, before the first
byte is copied; images of other nodes are private copies. From a checkpoint: the step is leased. A
version that cannot be pinned completely is not opened, so a reader never has parts of two versions.

A slot is mapped once, and locked for each version that is copied. A new mapping costs more than a
copy from an existing one, and slots are reused, so a reader keeps the mapping and acquires the lock
for each read. The lock is shared with other readers and is never waited for: while a trainer fills
the slot, the version that the reader looks for is gone.

A forked child does not share the lock (see ``fs.locks``), and keeps its mappings.
"""

import logging
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinity_sync.errors import CommitError, ConfigError, ImageError, WeightSyncError
from trinity_sync.fs.atomic import open_no_follow
from trinity_sync.fs.direct_io import digest_parts
from trinity_sync.fs.locks import LockFile
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import VersionTag, read_version_tag
from trinity_sync.storage.discovery import list_shards, require_run, require_unreplaced
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import FileRecord
from trinity_sync.storage.restore import require_size
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.tensors.deserialize import Unread
from trinity_sync.tensors.health import ValueScan
from trinity_sync.tensors.in_place import NOT_LIVE, find_copies
from trinity_sync.tensors.torch_private import acts_on_load
from trinity_sync.tensors.unshard import (
    FullTensor,
    combine_tensor,
    copy_full_tensors,
    copy_value,
    map_names,
    plan_unshard,
    round_plan,
    view_full_tensor,
)
from trinity_sync.weights.versions import ImageCopy, Version, VersionUnavailableError

logger = logging.getLogger(__name__)

Target = nn.Module | Mapping[str, torch.Tensor] | Mapping[str, nn.Module]
FetchImages = Callable[[Sequence[int]], Sequence[ImageCopy]]
"""Returns the images of these ranks, which are on other nodes."""


@dataclass(frozen=True)
class VersionView:
    """The tensors of one version, valid within the ``with`` block that returned the view."""

    version: Version
    plan: tuple[FullTensor, ...]
    images: Sequence[torch.Tensor]
    """The image of each rank, ``uint8`` of shape ``[nbytes]``."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """What is no plain tensor in the first image, by name."""

    @property
    def rounded(self) -> set[str]:
        """Names of the tensors that are rounded as they are read."""
        return {n for full in self.plan if full.read_dtype != full.dtype for n in full.names}

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, one at a time; tied tensors once, under their first name.

        Each tensor is on the CPU, in memory of its own.
        """
        for full in self.plan:
            yield full.names[0], combine_tensor(full, self.images)

    def list_named(self) -> list[tuple[tuple[str, ...], tuple[int, ...], torch.dtype]]:
        """Return names, full shape and dtype of each tensor, in the order of `iter_tensors`."""
        return [(full.names, full.shape, full.read_dtype) for full in self.plan]

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor, as `iter_views`, by any of its names."""
        full = next(full for full in self.plan if name in full.names)
        return view_full_tensor(full, self.images)

    def list_outlines(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return name, full shape and dtype of each tensor, in the order of `iter_views`."""
        return [(name, shape, dtype) for names, shape, dtype in self.list_named() for name in names]

    def iter_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all names, those of tied tensors as well, and full tensors to read from in place.

        A tensor that one image holds is a view of it: only those of its bytes are read that the
        caller copies, such as the part of a tensor-parallel worker. It must not be written to,
        which ends the process, nor be used once the version is closed. Others, and those to round,
        are combined in memory of their own.
        """
        for full in self.plan:
            tensor = view_full_tensor(full, self.images)
            for name in full.names:
                yield name, tensor

    def load_into(self, target: Target) -> None:
        """Copy every tensor into the parameter or buffer of its name, in one copy.

        Args:
            target: a module, or tensors by name, on any device; every one is filled. What else the
                state of a module has, such as extra state, is passed to its ``load_state_dict``.

        Raises:
            ConfigError: the target is neither.
            WeightSyncError: names, shapes or dtypes differ, or a target is a DTensor or on the meta
                device, or a copy in the state of a module that was passed as a dict; nothing was
                loaded. Or a module's ``load_state_dict`` has raised.
        """
        target, state, names = list_targets(target)
        named = {name: state[given] for name, given in names.items()}
        full = {name: each for each in self.plan for name in each.names}
        copies = find_copies(target, named)
        values, problems = dict[str, Any](), list[str]()
        for name in copies:
            if isinstance(target, nn.Module):
                try:
                    values[names[name]] = self._copy(name, full)
                except WeightSyncError as error:
                    problems.append(f"{name} {error}")
            elif named[name] is not self.others.get(name):  # both are None otherwise
                problems.append(f"{name} is {NOT_LIVE}; pass the module")
        if isinstance(target, nn.Module):
            more = {name for name, value in self.others.items() if value is not None}
            problems += [f"{name} is not in what it is loaded into" for name in more - {*names}]
        targets = {name: each for name, each in named.items() if name not in copies}
        plan = [each for each in self.plan if {*each.names} - {*copies}]
        copy_full_tensors(plan, self.images, targets, problems)
        if isinstance(target, nn.Module) and (copies or acts_on_load(target)):
            state.update(values)
            try:
                target.load_state_dict(state)
            except Exception as error:
                raise WeightSyncError(
                    f"{_describe(self.version)} is loaded in part: load_state_dict of "
                    f"{type(target).__name__} has raised: {error}. Build the model from the "
                    "trainer's config"
                ) from error

    def _copy(self, name: str, full: Mapping[str, FullTensor]) -> Any:
        """Return a value of the version in memory of its own."""
        if name not in full and name not in self.others:
            raise WeightSyncError("is not in the version")
        if name not in full:
            return copy_value(self.others[name], self.images)
        is_extra = name.endswith("_extra_state")  # which has a dtype of its own
        wanted = replace(full[name], read_dtype=full[name].dtype) if is_extra else full[name]
        return combine_tensor(wanted, self.images)


def list_targets(target: Any) -> tuple[Any, Any, dict[str, str]]:
    """Return a target, its state, and the names of that by those of the plain model.

    Raises:
        ConfigError: it is neither a module nor tensors by name.
        WeightSyncError: two of them have one name.
    """
    inner = target.get("model") if isinstance(target, Mapping) else None
    has_components = isinstance(inner, nn.Module | Mapping)
    if has_components and len(target) == 1:
        target = inner
    elif has_components or not isinstance(target, nn.Module | Mapping):
        given = f"the components {[*target]}" if has_components else f"a {type(target).__name__}"
        raise ConfigError(
            f"weights are loaded into a module or into tensors by name, and got {given}; pass the "
            "module. CheckpointCoordinator.load_into fills other components as well"
        )
    state = target.state_dict() if isinstance(target, nn.Module) else target
    return target, state, map_names(state)


class VersionOpener:
    """Opens versions for the reader ``name``; keeps slots mapped and unsharding plans between them.

    Leases have the reader's name. ``verify`` compares digests of a checkpoint's files, not their
    sizes alone. ``node`` is the Ray node id (hex) of this process; None if all images are on its
    node. Floating-point tensors are rounded to ``dtype``, unless that is None.
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
        self._planned: tuple[Sequence[str], tuple[FullTensor, ...], dict[str, Any]] = (), (), {}
        """Layouts of the images that were read last, their plan, and `VersionView.others`."""

    @contextmanager
    def open_images(
        self, version: Version, fetch_images: FetchImages, keep_float32: Collection[str] = ()
    ) -> Iterator[VersionView]:
        """Yield a version in shared memory: images of this node in place, others as copies.

        Raises:
            VersionUnavailableError: an image was overwritten or removed, or cannot be fetched; or
                has values that the job's ``on_nonfinite`` refuses.
            WeightSyncError: images are missing, or do not add up to full tensors.
        """
        refs = sorted(version.images, key=lambda ref: ref.rank)
        if not refs:
            raise WeightSyncError(
                f"{_describe(version)} was given as a dict; get it by get_model_state_dict, or "
                "have the trainer upload it"
            )
        # a mapping keeps the memory of what a job that was in the root before has removed
        here = {Path(ref.slot).parent for ref in refs}
        self._slots = {name: s for name, s in self._slots.items() if s.path.parent in here}
        images: dict[int, tuple[VersionTag, torch.Tensor]] = {}
        remote = [ref.rank for ref in refs if self._node not in (None, ref.node)]
        with ExitStack() as locks:
            for ref in refs:
                if ref.rank in remote:
                    continue
                slot = self._slots.setdefault(ref.slot, SlotReader(Path(ref.slot)))
                tag = slot.try_lock(ref.image)
                if tag is None:
                    raise VersionUnavailableError(
                        f"{_describe(version)}: the image in {ref.slot} was overwritten"
                    )
                locks.callback(slot.unlock)
                images[ref.rank] = tag, slot.memory[: ref.nbytes]
            if remote:
                for rank, (tag, content) in zip(remote, fetch_images(remote), strict=True):
                    images[rank] = tag, view_read_only(memoryview(content))
            for rank, ref in enumerate(refs):
                tag, _ = images[ref.rank]
                found = (tag.run, tag.step, tag.role, tag.rank, tag.world_size)
                if found != (version.run, version.step, version.role, rank, len(refs)):
                    raise WeightSyncError(
                        f"{_describe(version)} names images of {len(refs)} ranks, and {ref.slot} "
                        f"holds that of rank {tag.rank} of {tag.world_size} of {tag.role} at step "
                        f"{tag.step}; have all ranks of the trainer upload the version again"
                    )
            tags, memories = zip(*(images[ref.rank] for ref in refs), strict=True)
            require_finite(version, [each.numpy().data for each in memories])
            yield self._view(version, memories, keep_float32, [tag.layout for tag in tags])

    @contextmanager
    def open_checkpoint(
        self, version: Version, keep_float32: Collection[str] = ()
    ) -> Iterator[VersionView]:
        """Yield a committed step, mapped from its files.

        Raises:
            VersionUnavailableError: the step is corrupted, or no longer committed by that run.
            WeightSyncError: it has no weights of the role.
        """
        root, step = Path(version.root), version.step
        with ExitStack() as leased:
            try:
                manifest = leased.enter_context(
                    lease_to_read(root, step, self._name, paths=())  # checked when they are mapped
                )
                require_run(root, manifest, version, "Read a newer version.", version.identity)
            except CommitError as error:
                raise VersionUnavailableError(f"{_describe(version)}: {error}") from error
            try:
                records = list_shards(root, manifest, version.role, "model")
            except CommitError as error:
                raise WeightSyncError(f"{_describe(version)}: {error}") from error
            try:
                folder = step_folder(root, step)
                mapped = [_map_file(folder / record.path, record) for record in records]
                require_unreplaced(root, manifest)  # mapped files stay those of this commit
            except (CommitError, FileNotFoundError) as error:
                raise VersionUnavailableError(f"{_describe(version)}: {error}") from error
            for content, record in zip(mapped, records, strict=True):
                if self._verify and digest_parts((content,)) != record.digest:
                    raise WeightSyncError(
                        f"{folder / record.path} is corrupted: its digest is not that of the "
                        "manifest; restore the file from a copy, or remove the step"
                    )
            yield self._view(version, [*map(view_read_only, mapped)], keep_float32)

    def close(self) -> None:
        """Unmap the slots, each with the last view of it."""
        self._slots.clear()

    def _view(
        self,
        version: Version,
        images: Sequence[torch.Tensor],
        keep_float32: Collection[str],
        layouts: Sequence[str] = (),
    ) -> VersionView:
        """Return the view of images, whose plan is kept for others of the same ``layouts``."""
        if not layouts or layouts != self._planned[0]:
            others: dict[str, Any] = {}
            try:
                plan = plan_unshard([each.numpy().data for each in images], others=others)
            except ImageError as error:
                raise ImageError(f"{_describe(version)}: {error}") from error
            skipped = [n for n, value in others.items() if isinstance(value, Unread | torch.Tensor)]
            if skipped:
                logger.warning(
                    "%s has tensors that readers skip: %s", _describe(version), ", ".join(skipped)
                )
            self._planned = layouts, plan, others
        _, plan, others = self._planned
        return VersionView(version, round_plan(plan, self._dtype, keep_float32), images, others)


def require_finite(version: Version, images: Sequence[memoryview]) -> None:
    """Require that images have no values that the job refuses to save."""
    if read_job_settings(version.root).on_nonfinite != "refuse":
        return
    for image in images:
        scan = ValueScan(image)
        list(scan.walk(image))
        if names := scan.sum_up()[-1]:
            raise VersionUnavailableError(
                f"{_describe(version)} has non-finite values in {', '.join(names)}, which the job "
                "refuses (on_nonfinite)"
            )


def _map_file(path: Path, record: FileRecord) -> memoryview:
    with open_no_follow(path) as file:
        require_size(path, record, os.fstat(file.fileno()).st_size)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _describe(version: Version) -> str:
    return f"version {version.step} (run {version.run}) of {version.role} in {version.root}"


class SlotReader:
    """The file at ``path``, mapped read-only at the first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The slot's bytes, ``uint8`` and read-only; those of a version under the lock only."""
        self._mapped: os.stat_result | None = None
        self._readings: list[LockFile] = []
        """The file and the lock of each read in progress; reads may nest."""

    def try_lock(self, image: str) -> VersionTag | None:
        """Acquire a shared lock if the slot holds ``image``; return its version tag, or None.

        Raises:
            FormatError: the trainer is of another release.
        """
        with suppress(FileNotFoundError), ExitStack() as opened:
            JobSpool(self.path.parent).read_root()  # which refuses a folder of another release
            file = opened.enter_context(closing(LockFile(self.path, os.O_RDONLY)))
            tag = read_version_tag(self.path) if file.try_acquire(shared=True) else None
            if tag and tag.image == image and self._map(file, tag.nbytes):
                opened.pop_all()
                self._readings.append(file)
                return tag
        return None

    def unlock(self) -> None:
        """Release the lock of one read; in a forked child, leave the parent's to it."""
        self._readings.pop().close()

    def _map(self, file: LockFile, nbytes: int) -> bool:
        """Return whether the file has ``nbytes`` bytes; map it if it is new, or has grown."""
        found, known = os.fstat(file.fd), self._mapped
        if found.st_size < nbytes:  # truncated: reading a mapping beyond the end is a bus error
            return False
        if not known or not os.path.samestat(found, known) or len(self.memory) < nbytes:
            self.memory = view_read_only(memoryview(file.map(found.st_size, populate=True)))
            self._mapped = found
        return True


def view_read_only(content: memoryview) -> torch.Tensor:
    """Return read-only bytes as a ``uint8`` tensor, without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor is not writable
        return torch.frombuffer(content, dtype=torch.uint8)
