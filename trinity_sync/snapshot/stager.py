"""Stage states: copy live tensors once into warm slots, and seal the images.

This is the whole cost of a save for the training loop. `Stager.lay_out` plans the files, and
`Stager.copy` copies the tensors into them, in the call or in a thread while training continues.
"""

import errno
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from trinity_sync.errors import ImageError, SpoolError, describe_error
from trinity_sync.layout import Component, check_number, shard_file
from trinity_sync.snapshot.identity import Origin
from trinity_sync.snapshot.image import ALIGNMENT, LaidOut, Layout, Storages, fill, lay_out
from trinity_sync.snapshot.mutation_guard import MutationGuard, has_samples
from trinity_sync.snapshot.packed import Packed
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.slot_pool import SlotKey, SlotMemory, SlotPool
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import (
    Ticket,
    VersionTag,
    failure_path,
    is_named,
    seal,
    ticket_path,
    write_version_tag,
)
from trinity_sync.tensors.memcpy import ComputedEvents, equal_bytes, record_computed, use_device
from trinity_sync.tensors.torch_private import get_shard

logger = logging.getLogger(__name__)

METADATA: Component = "metadata"
ATTACHMENTS: Component = "attachments"
_NAMED = 512
"""Bytes of a tensor's name and headers in a file: a slot that lacks some is mapped again."""


@dataclass(frozen=True)
class Staged:
    """What a save has put into the spool, and what it cost the caller."""

    components: tuple[str, ...]
    nbytes: int
    stall_s: float
    """Seconds for which the caller was stalled until the seal, as in the tickets."""
    waited_s: float
    """Seconds of it spent waiting for a free slot: the storage does not keep up."""
    images: tuple[str, ...] = ()
    """Random names of the sealed images, as in their tickets."""
    failure: str = ""
    """Why nothing was staged, which `CheckpointCoordinator.wait_all` raises; empty otherwise."""
    submitted: Future["Staged"] | None = field(default=None, repr=False)
    """The same of an overlapped save, once it is submitted."""


@dataclass(frozen=True)
class _Part:
    """A file of a save."""

    component: str
    path: str
    form: Literal["file", "folder"]
    layout: Layout
    storages: Storages
    watch: MutationGuard | None
    packed: Packed | None = None
    """Files that a folder is made of."""
    staged_in: Slot | None = None
    """Slot that already holds the image, unsealed; locked until the save is sealed."""


@dataclass
class StagePlan:
    """A save whose files are laid out but not copied yet: until then tensors must not change."""

    origin: Origin
    began: float
    overlap: bool
    seals: bool
    again: bool
    components: tuple[str, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)
    """Images of components that were submitted earlier, by component."""
    parts: list[_Part] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of all files that are copied, together."""
    locks: ExitStack = field(default_factory=ExitStack)
    """Releases the slots that already hold an image."""
    computed: ComputedEvents = field(default_factory=dict)
    before_seal: Callable[[], object] | None = None
    """Called once all is copied; nothing is sealed after an error of it."""
    laid_out_s: float = 0.0
    """Seconds from the beginning until the plan was complete, which is all that an overlapped save
    stalls the call for."""


class Stager:
    """Stages the components of one rank; their slots stay mapped between saves.

    With two ``slots`` per component, one image is persisted while the next is staged. ``ranks``
    save on this node. For ``slot_wait_s`` staging waits for a slot, and the image of a checkpoint
    cannot be evicted. ``clock`` returns monotonic seconds, the same for all processes of the node:
    setting a wall clock forward would age new images. ``on_long_wait`` is called while a save waits
    for a slot.
    """

    def __init__(
        self,
        spool: JobSpool,
        *,
        slots: int = 2,
        ranks: int = 1,
        slot_wait_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        on_long_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._spool, self._ranks, self._slots = spool, ranks, slots
        self._has_required_room = False
        self.slots = SlotPool(spool, slots, slot_wait_s, clock, on_long_wait)
        self._layouts: dict[tuple[str, str, int], tuple[int, Layout | None]] = {}
        """Step and layout of the last image, by role, component and rank."""
        self.memory = SlotMemory(self.slots, spool.folder, clock)
        self._fills: list[tuple[SlotKey, Slot, int]] = []
        """What the last copy filled, until `memory` looks after it."""
        self.waiting_since: float | None = None
        """When the trainer began to wait for an overlapped copy (`time.perf_counter`), which the
        tickets count as a stall; None if it does not wait."""

    def stage(self, origin: Origin, states: Mapping[str, Any], **options: Any) -> Staged:
        """Copy states into slots and seal the images; arguments and errors as of `lay_out`."""
        return self.copy(self.lay_out(origin, states, **options))

    def lay_out(
        self,
        origin: Origin,
        states: Mapping[str, Any],
        *,
        also: Sequence[str] = (),
        metadata: Packed | None = None,
        attachments: Packed | None = None,
        overlap: bool = False,
        check: bool = False,
        seals: bool = True,
        again: bool = False,
        began: float | None = None,
    ) -> StagePlan:
        """Lay out the files of a save, with copies of all plain values; `copy` has to follow.

        With ``overlap`` it follows in a thread, while training continues. The copy of an earlier
        save must have ended.

        Each of ``states``, by component, becomes one ``.pt`` file of this rank, and a `LaidOut` the
        file that it names. ``also`` names components of this save that were submitted earlier, at
        the same step. ``metadata`` and ``attachments`` are packed by `pack`. ``check`` is that of
        `MutationGuard`. Without ``seals``, images are only published and not saved. With ``again``,
        the save has failed before: its images that are equal are sealed again. The stall counts
        from ``began``, a value of `time.perf_counter`, by default from now.

        Raises:
            ImageError: a state cannot be pickled; the message names the key.
        """
        began = time.perf_counter() if began is None else began
        self.memory.interrupt()
        plan = StagePlan(origin, began, overlap, seals, again)
        self.waiting_since = None
        for name in also:
            if image := self.slots.find_image(origin, name):
                plan.shared[name] = image
        names, storages = [*states, *also], list[torch.UntypedStorage]()
        own = f"{ATTACHMENTS}/rank_{origin.rank}" if origin.rank else ATTACHMENTS
        with plan.locks:  # released here if a state cannot be laid out
            for name, state in states.items():
                part = self._lay_out(plan, name, state, check)
                storages += part.storages
                plan.parts.append(part)
            for name, path, packed in (
                (METADATA, origin.role, metadata),
                (ATTACHMENTS, own, attachments),
            ):
                if packed is None:
                    continue
                names.append(name)
                layout = Layout(packed.nbytes, packed.extents, [])
                comparable = again and not packed.files
                staged = self._hold_equal(plan, name, layout, []) if comparable else None
                plan.parts.append(_Part(name, path, "folder", layout, [], None, packed, staged))
            plan.components = tuple(dict.fromkeys(names))
            for part in plan.parts:
                plan.nbytes += 0 if part.staged_in else part.layout.nbytes
            plan.computed = record_computed(storages)
            plan.locks = plan.locks.pop_all()
        plan.laid_out_s = time.perf_counter() - began
        return plan

    def _lay_out(self, plan: StagePlan, component: str, state: Any, check: bool) -> _Part:
        origin = plan.origin
        key = (origin.role, component, origin.rank)
        last, known = self._layouts.get(key, (-1, None))
        with _name_in_errors(origin, component):
            layout, storages = lay_out(state, known)
        self._layouts[key] = origin.step, layout
        shard = shard_file(component, origin.count_ranks(component), origin.rank)
        path = f"{origin.role}/{state.name if isinstance(state, LaidOut) else shard}"
        if last == origin.step and (staged := self._hold_equal(plan, component, layout, storages)):
            return _Part(component, path, "file", layout, [], None, staged_in=staged)
        if not plan.overlap:
            return _Part(component, path, "file", layout, storages, None)
        with _name_in_errors(origin, component):
            watch = MutationGuard(state, storages, layout, check=check)
        return _Part(component, path, "file", layout, watch.storages, watch)

    def _hold_equal(
        self, plan: StagePlan, component: str, layout: Layout, storages: Storages
    ) -> Slot | None:
        """Return the slot with an equal image of the step that this save can seal, or None.

        That is an unsealed one, and, if the save is submitted again, one that it has sealed:
        another save may share it. It is locked until the plan's locks are closed.
        """
        slot = self.slots.hold_image(plan.origin, component)
        if slot is None:
            return None
        own = plan.again and slot.holds is not None and slot.holds.kind == plan.origin.kind
        if (slot.free or own) and _has(slot, layout, storages):
            plan.locks.callback(slot.unlock)
            return slot
        slot.unlock()
        return None

    def copy(self, plan: StagePlan) -> Staged:
        """Copy what was laid out into slots, and seal the images, which then survive this process.

        Nothing is sealed after an error.

        Raises:
            ImageError: a tensor cannot be copied, or has changed since an overlapped save was laid
                out; the message names it.
            SpoolFullError: the spool has no room.
            SpoolError: no slot became free within ``slot_wait_s``, or the spool cannot be written.
        """
        waited = 0.0
        filled: list[tuple[Slot, Ticket]] = []
        self._fills = []
        with _name_unwritable(plan.origin), plan.locks, use_device(plan.computed):
            if not self._has_required_room:
                self.require_room(plan.nbytes, raises=False)  # `acquire` does if nothing else helps
            for part in plan.parts:
                if part.staged_in:
                    filled.append((part.staged_in, self._ticket(plan, part)))
                    continue
                slot, seconds = self.slots.acquire(plan.origin, part.component, part.layout.nbytes)
                plan.locks.callback(slot.unlock)
                waited += seconds
                filled.append((slot, self._fill(slot, plan, part)))
                key = (plan.origin.role, part.component, plan.origin.rank)
                self._fills.append((key, slot, part.layout.nbytes))
            if plan.again and all(not s.free and s.holds == ticket for s, ticket in filled):
                for slot, _ in filled:  # the same submission: a retry may be writing it
                    failure_path(slot.path).unlink(missing_ok=True)
            elif plan.seals:
                if plan.before_seal:
                    plan.before_seal()
                self._seal(filled, self._measure_stall(plan))
                if plan.again:
                    self.slots.free_others(plan.origin, {ticket.image for _, ticket in filled})
            images = []
            for slot, ticket in filled:
                slot.holds = ticket
                images.append(ticket.image)
        stall_s = self._measure_stall(plan)
        if plan.seals:  # otherwise once it is published: it must not be given back before
            self.memory.look_after(self._fills)
        return Staged(plan.components, plan.nbytes, stall_s, waited, tuple(images))

    def _measure_stall(self, plan: StagePlan) -> float:
        """Return the seconds for which a save has stalled its caller until now."""
        now = time.perf_counter()
        if not plan.overlap:
            return now - plan.began
        waiting_since = self.waiting_since
        return plan.laid_out_s + (now - waiting_since if waiting_since is not None else 0.0)

    def _seal(self, filled: Sequence[tuple[Slot, Ticket]], stall_s: float) -> None:
        """Seal all images, or none."""
        done: list[Slot] = []
        sealed_at, monotonic_s = time.time(), self._clock()  # one value identifies a submission
        try:
            for slot, ticket in filled:
                if not is_named(slot.file, slot.path):
                    raise SpoolError(
                        f"step {ticket.step}, role {ticket.role}, rank {ticket.rank}: nothing was "
                        f"submitted, because {slot.path} was removed while it was filled. Look "
                        "for what removes it (trinity-sync doctor names systemd's RemoveIPC). "
                        "Later saves try again."
                    )
                was_free = slot.free
                seal(
                    slot.path,
                    replace(ticket, sealed_at=sealed_at, monotonic_s=monotonic_s, stall_s=stall_s),
                )
                if was_free:
                    done.append(slot)
        except BaseException:
            for slot in done:
                ticket_path(slot.path).unlink(missing_ok=True)
            raise

    def holds(self, origin: Origin, component: str, state: Any, *, on_device: bool = False) -> bool:
        """Return whether this process still has the image of a component at this step, unchanged.

        Of tensors on a GPU a sample is compared, which an optimizer's step changes; with
        ``on_device`` all of them, which copies them to the CPU.

        Raises:
            ImageError: the state cannot be laid out.
        """
        slot = self.slots.hold_image(origin, component)
        if slot is None:
            return False
        try:
            key = (origin.role, component, origin.rank)
            layout, storages = lay_out(state, self._layouts.get(key, (-1, None))[1])
            if on_device:
                storages = [storage.cpu() for storage in storages]
            return _has(slot, layout, storages)
        finally:
            slot.unlock()

    def publish(self, origin: Origin, component: str) -> VersionTag | None:
        """Publish the step's image to readers as a version of the weights, and return its tag.

        None if this process no longer has the image.

        Raises:
            SpoolError: the spool cannot be written.
        """
        with _name_unwritable(origin), ExitStack() as lock:
            lock.callback(self.memory.look_after, self._fills)
            slot = self.slots.hold_image(origin, component)
            if slot is None:
                return None
            lock.callback(slot.unlock)
            if slot.holds is None or slot.laid_out is None:
                return None
            published = VersionTag(
                image=slot.holds.image,
                run=origin.run,
                run_key=origin.run_key,
                step=origin.step,
                role=origin.role,
                rank=origin.rank,
                world_size=origin.world_size,
                nbytes=slot.holds.nbytes,
                layout=slot.laid_out.digest,
            )
            write_version_tag(slot.path, published)
        return published

    def require_room(self, nbytes: int, *, raises: bool = True) -> None:
        """As `CheckpointCoordinator.require_room`; without ``raises`` too little is a warning."""
        self._has_required_room = True
        self._spool.require_room(self._ranks * nbytes, slots=self._slots, raises=raises)

    def close(self) -> None:
        """Unmap all slots, and delete those without a sealed image."""
        self.memory.close()
        self.slots.close()

    def _fill(self, slot: Slot, plan: StagePlan, part: _Part) -> Ticket:
        ticket = self._ticket(plan, part)
        image = slot.begin(ticket.image, part.layout.nbytes)
        if plan.computed and any(storage.is_cuda for storage in part.storages):
            slot.pin()
        there, slot.laid_out = slot.laid_out, None  # until the image is complete
        threads = 1 if plan.overlap else 0  # training has the other cores
        how: dict[str, Any] = {"there": there, "computed": plan.computed, "threads": threads}
        how["fresh"] = None if slot.is_mapped else slot.file.fd
        if part.watch:
            part.watch.fill(image, slot.file.fd, ticket.what, **how)
        else:
            fill(image, part.layout, part.storages, **how)
        if part.packed:
            with _name_in_errors(plan.origin, part.component):
                part.packed.read_files(image.numpy().data)
        slot.laid_out = part.layout
        return ticket

    def _ticket(self, plan: StagePlan, part: _Part) -> Ticket:
        known = part.staged_in.holds if part.staged_in else None
        return Ticket(
            image=known.image if known else uuid.uuid4().hex,
            component=part.component,
            components=plan.components,
            shared=dict(plan.shared),
            path=part.path,
            form=part.form,
            nbytes=part.layout.nbytes,
            sealed_at=0.0,
            monotonic_s=0.0,
            stall_s=0.0,
            **vars(plan.origin),
        )


def estimate_nbytes(size: int | torch.nn.Module | torch.optim.Optimizer) -> int:
    """Return a size in bytes, or that of the image of a module's or optimizer's state.

    An optimizer with ``betas`` has two tensors a parameter that is trained, or three, and a number
    of steps; one with ``momentum`` has one.

    Raises:
        ConfigError: it is none of these.
    """
    count, steps = 1, 0
    if isinstance(size, torch.nn.Module):
        tensors = [*size.parameters(), *size.buffers()]
    elif not isinstance(size, torch.optim.Optimizer):
        return check_number("a size in bytes", size)
    else:
        given = (each for group in size.param_groups for each in group["params"])
        tensors = [each for each in given if each.requires_grad]
        has = size.defaults.get
        steps = int("betas" in size.defaults)
        count = 2 + bool(has("amsgrad")) if steps else int(bool(has("momentum")))
    headers = (count + steps) * len(tensors) * (ALIGNMENT + _NAMED)
    return count * sum(get_shard(each).nbytes for each in tensors) + headers


def is_torch_optimizer(optimizer: object) -> bool:
    """Return whether it is torch's own; states of others may be smaller than `estimate_nbytes`."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _has(slot: Slot, layout: Layout, storages: Storages) -> bool:
    """Return whether the image in a locked slot is that of a state; on a GPU, by a sample."""
    if slot.laid_out is None or not slot.laid_out.equals(layout):
        return False
    image, by_device = slot.image(layout.nbytes), defaultdict[torch.device, list[Any]](list)
    for (offset, _), storage in zip(layout.holes, storages, strict=True):
        by_device[storage.device].append((offset, storage))
    on_cpu = by_device.pop(torch.device("cpu"), [])
    return equal_bytes(image, on_cpu) and all(
        has_samples(image, parts) for parts in by_device.values()
    )


@contextmanager
def _name_in_errors(origin: Origin, component: str) -> Iterator[None]:
    """Turn every error of a state into an `ImageError` that names the save and the component."""
    try:
        yield
    except Exception as error:
        raise ImageError(
            f"step {origin.step}, role {origin.role}, rank {origin.rank}: nothing was submitted, "
            f"because {component} cannot be staged: {describe_error(error)}"
        ) from error


@contextmanager
def _name_unwritable(origin: Origin) -> Iterator[None]:
    """Turn an error of the spool's file system into a `SpoolError` that names the save."""
    try:
        yield
    except OSError as error:
        of_process = error.errno == errno.EMFILE  # whose limit of open files it is
        raise SpoolError(
            f"step {origin.step}, role {origin.role}, rank {origin.rank}: nothing was submitted, "
            f"because {error.filename or 'the spool'} cannot be written: {error.strerror}. "
            f"{'Raise its limit, ulimit -n.' if of_process else 'Is the shared memory full?'} "
            "Later saves try again."
        ) from error
