"""Staging: one copy from live tensors into warm slots, then the seals.

This is all that a save costs the training loop.
"""

import io
import logging
import tarfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trinity_sync.errors import SpoolError
from trinity_sync.layout import Component, Kind, shard_file
from trinity_sync.snapshot.copying import Computed, computed_now
from trinity_sync.snapshot.image import Layout, Storages, fill, lay_out
from trinity_sync.snapshot.kept import forget
from trinity_sync.snapshot.overlap import Watch
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import Export, Ticket, failure_path, seal, ticket_path

logger = logging.getLogger(__name__)

METADATA: Component = "metadata"
ATTACHMENTS: Component = "attachments"


@dataclass(frozen=True)
class Origin:
    """Who saves what: the part of a ticket that all images of one hand-over share."""

    root: str
    run: int
    run_key: str
    step: int
    kind: Kind
    role: str
    roles: tuple[str, ...]
    rank: int
    world_size: int
    node_ranks: tuple[int, ...]
    keep: int = 0
    """Checkpoints that are left once this one is committed; 0 for all."""
    export: Export = ""


@dataclass(frozen=True)
class Staged:
    """What one hand-over put into the spool, and what it cost the caller."""

    components: tuple[str, ...]
    nbytes: int
    stall_s: float
    """Seconds from the call to the last seal."""
    waited_s: float
    """Seconds thereof that no slot was free: the storage does not keep up."""


@dataclass(frozen=True)
class _Part:
    """One file of a hand-over."""

    component: str
    path: str
    form: Literal["file", "folder"]
    layout: Layout
    storages: Storages
    watch: Watch | None


@dataclass(frozen=True)
class Plan:
    """A hand-over whose files are laid out and not copied yet."""

    origin: Origin
    components: tuple[str, ...]
    parts: Sequence[_Part]
    computed: Computed
    began: float

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(part.layout.nbytes for part in self.parts)


class Stager:
    """Stages the components of one rank; keeps their slots mapped between saves.

    Args:
        spool: the job's folder on this node.
        slots: slots per component; two let one be written while the other is filled.
        slot_wait_s: seconds after its seal for which an image that nobody writes keeps its slot
            when all slots are taken, and that staging waits for writers at most.
        clock: source of the tickets' times.
    """

    def __init__(
        self,
        spool: JobSpool,
        *,
        slots: int = 2,
        slot_wait_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spool = spool
        self._count = slots
        self._wait_s = slot_wait_s
        self._clock = clock
        self._slots: dict[tuple[str, str, int], list[Slot]] = {}
        self._layouts: dict[tuple[str, str, int], Layout] = {}

    def stage(
        self,
        origin: Origin,
        states: Mapping[str, Any],
        *,
        also: Sequence[str] = (),
        metadata: bytes | None = None,
        attachments: bytes | None = None,
    ) -> Staged:
        """Copy ``states`` into slots and seal them; afterwards they survive this process.

        Args and errors are those of `plan` and `carry_out`, one after the other.
        """
        plan = self.plan(origin, states, also=also, metadata=metadata, attachments=attachments)
        return self.carry_out(plan)

    def plan(
        self,
        origin: Origin,
        states: Mapping[str, Any],
        *,
        also: Sequence[str] = (),
        metadata: bytes | None = None,
        attachments: bytes | None = None,
        overlap: bool = False,
        check: bool = False,
    ) -> Plan:
        """Lay the files out; plain values are taken here and now, tensors when it is carried out.

        Args:
            origin: who hands over.
            states: state by component; each becomes one ``.pt`` file of this rank.
            also: components of this save that were handed over earlier, at the same step.
            metadata: a folder of small files, as packed by `pack_folder`.
            attachments: files of the step itself, as packed by `pack`.
            overlap: whether training goes on before the plan is carried out, see ``overlap``.
            check: as in `Watch`.

        Raises:
            ImageError: a state cannot be laid out.
        """
        began = time.perf_counter()
        parts: list[_Part] = []
        for component, state in states.items():
            key = (origin.role, component, origin.rank)
            layout, storages = lay_out(state, self._layouts.get(key))
            self._layouts[key] = layout
            path = f"{origin.role}/{shard_file(component, origin.world_size, origin.rank)}"
            watch = Watch(state, storages, layout, check=check) if overlap else None
            storages = watch.storages if watch else storages
            parts.append(_Part(component, path, "file", layout, storages, watch))
        own = f"{ATTACHMENTS}/rank_{origin.rank}" if origin.rank else ATTACHMENTS
        folders = {METADATA: (origin.role, metadata), ATTACHMENTS: (own, attachments)}
        for folder, (path, packed) in folders.items():
            if packed is not None:
                layout = Layout(len(packed), [(0, packed)], [], None)
                parts.append(_Part(folder, path, "folder", layout, [], None))
        return Plan(
            origin=origin,
            components=(*dict.fromkeys((*states, *also, *(part.component for part in parts))),),
            parts=parts,
            computed=computed_now(storage for part in parts for storage in part.storages),
            began=began,
        )

    def carry_out(self, plan: Plan, *, threads: int = 0) -> Staged:
        """Copy what was planned into slots and seal them, all of them or none.

        Args:
            plan: made by `plan`; the last one made is carried out before the next is made.
            threads: how many copy; 0 for as many as torch uses for one operation.

        Raises:
            SpoolFull: there is no room; nothing was handed over.
            SpoolError: writers hold every slot for longer than ``slot_wait_s``; likewise.
            ImageError: tensors changed before they were copied; likewise.
        """
        waited = 0.0
        filled: list[tuple[Slot, Ticket]] = []
        try:
            for part in plan.parts:
                slot, seconds = self._acquire(plan.origin, part.component)
                waited += seconds
                try:
                    filled.append((slot, self._fill(slot, plan, part, threads)))
                except BaseException:
                    slot.unlock()
                    raise
            for slot, ticket in filled:
                seal(slot.path, replace(ticket, sealed_at=self._clock()))
        finally:
            for slot, _ in filled:
                slot.unlock()
        return Staged(plan.components, plan.nbytes, time.perf_counter() - plan.began, waited)

    def prewarm(self, role: str, component: str, rank: int, nbytes: int) -> None:
        """Map and touch the slots of a component, so that its first save is as fast as the next."""
        for slot in self._slots_of(role, component, rank):
            if slot.try_lock():
                try:
                    slot.image(nbytes)
                finally:
                    slot.unlock()

    def close(self) -> None:
        """Unmap all slots and delete those in which no image waits."""
        for slots in self._slots.values():
            for slot in slots:
                slot.close(remove=True)
        self._slots.clear()

    def _fill(self, slot: Slot, plan: Plan, part: _Part, threads: int) -> Ticket:
        forget(slot.path)
        image = slot.image(part.layout.nbytes)
        if any(storage.device.type == "cuda" for storage in part.storages):
            slot.pin()
        headers = slot.laid_out is not part.layout
        slot.laid_out = None  # until it is whole
        fill(
            image,
            part.layout,
            part.storages,
            headers=headers,
            computed=plan.computed,
            threads=threads,
        )
        ticket = Ticket(
            image=uuid.uuid4().hex,
            component=part.component,
            components=plan.components,
            path=part.path,
            form=part.form,
            nbytes=part.layout.nbytes,
            sealed_at=0.0,
            **vars(plan.origin),
        )
        if part.watch:
            part.watch.require_unchanged(image, ticket.what)
        slot.laid_out = part.layout
        return ticket

    def _slots_of(self, role: str, component: str, rank: int) -> list[Slot]:
        key = (role, component, rank)
        if key not in self._slots:
            paths = [self._spool.slot(*key, number) for number in range(self._count)]
            self._slots[key] = [Slot(path) for path in paths]
        return self._slots[key]

    def _acquire(self, origin: Origin, component: str) -> tuple[Slot, float]:
        """A locked slot without an image, and the seconds that it took to get it."""
        slots = self._slots_of(origin.role, component, origin.rank)
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            for slot in slots:
                if slot.free and slot.try_lock():
                    if slot.free:
                        return slot, waited
                    slot.unlock()
            oldest_first = sorted(slots, key=lambda slot: slot.sealed_at)
            for slot in oldest_first:
                age = self._clock() - slot.sealed_at
                if (slot.failed or age >= self._wait_s) and slot.try_lock():
                    self._give_way(slot, origin, age)
                    return slot, waited
            if waited >= self._wait_s:
                raise SpoolError(
                    f"step {origin.step}, role {origin.role}, rank {origin.rank}: {component} is "
                    f"not saved, because every slot is still being written out after {waited:.0f} "
                    "s. Is the storage hanging? Later saves try again."
                )
            time.sleep(0.002)

    def _give_way(self, slot: Slot, origin: Origin, age: float) -> None:
        """Drop the image in ``slot``, which was not saved in time."""
        logger.warning(
            "AN UNSAVED IMAGE GIVES WAY: %s is dropped for step %d, because %s and no slot is "
            "free. Look at the flow runs of this job in the Prefect UI, or: trinity-sync status",
            slot.path,
            origin.step,
            "its save failed" if slot.failed else f"nobody wrote it within {age:.0f} s",
        )
        ticket_path(slot.path).unlink(missing_ok=True)
        failure_path(slot.path).unlink(missing_ok=True)


def pack_folder(folder: Path) -> bytes:
    """The files below ``folder`` as `pack` takes them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return pack({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})


def pack(files: Mapping[str, bytes]) -> bytes:
    """Files by name as one tar, in the given order and without owners and times."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
