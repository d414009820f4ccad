"""Choose the slot for the next image of a component, so that training hardly ever waits.

A free slot is acquired first, the one with the newest published version last. If readers hold all
free slots, a slot is added: training never waits for a reader. If all slots hold sealed images, the
call waits for their writer. An image is evicted if its save failed or it was not persisted in time:
a checkpoint is waited for as long as the caller says, with the weights that it shares; other
weights, and all images of a root that is away, for a few seconds. Weights go before checkpoints,
and if checkpoints hold all slots, one slot is added for weights.

`SlotMemory` looks after the memory of the slots, in a thread of low priority beside the training.
It maps what the next image fills: the first one's memory, and a second slot once commits take more
than half of the time between saves, or readers have the first. It gives back slots that saves do
without, and while memory is short all that is committed and that no reader can want.
"""

import atexit
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path

from trinity_sync.errors import SpoolError, SpoolFullError, TicketError, TrinitySyncError
from trinity_sync.fs.file_system import STALL, find_room, find_shortage, measure_ray_stores
from trinity_sync.fs.process import call_held_handlers, hold_handlers, lower_thread_priority
from trinity_sync.snapshot.identity import Origin
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import (
    failure_path,
    free_slot,
    read_ticket,
    read_version_tag,
    ticket_path,
)

logger = logging.getLogger(__name__)

WEIGHTS_WAIT_S = 10.0
"""Seconds after its seal in which an image of weights only is not evicted. A commit takes one or
two; with two slots, an image is rarely younger when the next version needs its slot."""
WEIGHTS_LIMIT_S = 30.0
"""Seconds for which a save of weights waits for a slot, at most: the next version comes soon."""
LONG_WAIT_S = 5.0
"""Seconds after which a warning says what a save waits for."""


SlotKey = tuple[str, str, int]
"""Role, component and rank of a component's slots."""


@dataclass(frozen=True)
class _Image:
    """A sealed image."""

    is_checkpoint: bool
    """Whether it is part of a checkpoint that can still be saved."""
    overdue_s: float
    """Seconds for which it has been evictable. Negative if it may not be evicted yet; infinite if
    it cannot be saved, or its save failed."""
    is_same_save: bool = False
    """Whether it was submitted with the same save. It stays then: the first images of a save count,
    and if one of them were evicted, images of two submissions would be mixed."""

    @property
    def order(self) -> tuple[bool, float]:
        """Key that sorts images by what is evicted first."""
        return self.is_checkpoint, -self.overdue_s

    @property
    def may_be_evicted(self) -> bool:
        """Whether it was not persisted in time."""
        return self.overdue_s >= 0 and not self.is_same_save

    def outlives(self, origin: Origin) -> bool:
        """Return whether a slot is added for an image of ``origin`` before this is evicted."""
        return self.is_same_save or (self.is_checkpoint and origin.kind != "checkpoint")


class SlotPool:
    """The slots of one process, by role, component and rank; they stay mapped between saves.

    A component has ``count`` slots; slots are added while slow readers hold them all. ``wait_s`` is
    ``slot_wait_s`` of `Stager`, ``clock`` and ``on_long_wait`` as there.
    """

    def __init__(
        self,
        spool: JobSpool,
        count: int,
        wait_s: float,
        clock: Callable[[], float],
        on_long_wait: Callable[[], None],
    ) -> None:
        self._spool = spool
        self._count = count
        self._wait_s = wait_s
        self._clock = clock
        self._on_long_wait = on_long_wait
        self.slots: dict[SlotKey, list[Slot]] = {}

    def wait_at_most(self, seconds: float) -> None:
        """Lower the time in seconds that `acquire` waits for a slot."""
        self._wait_s = min(self._wait_s, seconds)

    def close(self) -> None:
        """Unmap all slots, and delete those without a sealed image."""
        for key in [*self.slots]:
            for slot in self.slots.pop(key, ()):  # another thread may close as well
                slot.close(remove=True)

    def list_slots(self, role: str, component: str, rank: int) -> list[Slot]:
        """Return the slots of a rank's component, with those that an earlier process added."""
        self._spool.make()
        key = (role, component, rank)
        if key not in self.slots:
            slots = []
            for number in itertools.count():
                path = self._spool.slot(*key, number)
                if number >= self._count and not path.exists():
                    break
                slots.append(Slot(path))
            self.slots[key] = slots
        return self.slots[key]

    def find_next(self, role: str, component: str, rank: int) -> Slot | None:
        """Return the slot that the next image is to fill, or None if none is free."""
        return next(iter(_list_free(self.list_slots(role, component, rank))), None)

    def hold_image(self, origin: Origin, component: str) -> Slot | None:
        """Return the slot with the image that this process staged at this step, locked for reading.

        None if there is none, or if another trainer has overwritten the image.
        """
        for slot in self.slots.get((origin.role, component, origin.rank), ()):
            if slot.holds and origin.is_of_step(slot.holds) and slot.try_lock(shared=True):
                # another trainer may have filled the slot
                if slot.holds and origin.is_of_step(slot.holds):
                    return slot
                slot.unlock()
        return None

    def find_image(self, origin: Origin, component: str) -> str | None:
        """Return the random name of the image that `hold_image` finds; the slot is not locked."""
        slots = self.slots.get((origin.role, component, origin.rank), ())
        return next((s.holds.image for s in slots if s.holds and origin.is_of_step(s.holds)), None)

    def free_others(self, origin: Origin, images: Collection[str]) -> None:
        """Free the other images of a save that is submitted again: the first ones would count.

        ``images`` are the random names of those that stay.
        """
        slots = {slot.path: slot for slots in self.slots.values() for slot in slots}
        own = origin.kind, origin.role, origin.rank
        for sealed in self._spool.read_step(origin):
            ticket = sealed.ticket
            if (ticket.kind, ticket.role, ticket.rank) == own and ticket.image not in images:
                logger.warning(
                    "%s is submitted again after its save failed; dropping its earlier image %s",
                    ticket.what,
                    sealed.slot,
                )
                free_slot(sealed.slot, ticket.image)
                if sealed.slot in slots:
                    slots[sealed.slot].holds = None

    def acquire(self, origin: Origin, component: str, nbytes: int) -> tuple[Slot, float]:
        """Return a locked slot for an image of ``origin``, and the seconds spent waiting for it.

        The slot holds no sealed image.

        Raises:
            SpoolFullError: the spool has no room for it, and no other slot can become free.
            SpoolError: no slot became free in time.
        """
        slots = self.list_slots(origin.role, component, origin.rank)
        start, may_add, warned = time.monotonic(), True, False
        full = set[Slot]()
        is_checkpoint = origin.kind == "checkpoint"
        while True:  # `wait_at_most` may lower the limit meanwhile
            limit_s = self._wait_s if is_checkpoint else min(self._wait_s, WEIGHTS_LIMIT_S)
            waited = time.monotonic() - start
            free = _list_free(slots)
            for slot in free:
                if slot not in full and slot.try_lock():
                    if not slot.free:
                        slot.unlock()
                    elif self._reserve(slot, nbytes, slots, free, full):
                        return slot, waited
            held = {slot: self._look(slot, origin) for slot in slots if slot not in free}
            in_use = not free and all(held[slot].outlives(origin) for slot in slots)
            again = any(image.is_same_save for image in held.values())
            lacks = in_use and (again or len(slots) <= self._count)
            if may_add and (lacks or any(slot.published for slot in free)):
                if added := self._add_slot(origin, component, nbytes):
                    return added, waited
                may_add = False
            for slot in sorted(held, key=lambda slot: held[slot].order):
                if not held[slot].may_be_evicted or not slot.try_lock():
                    continue
                if slot.free:  # its commit has just freed it
                    return slot, waited
                if self._look(slot, origin).may_be_evicted:
                    self._evict(slot, origin)
                    return slot, waited
                slot.unlock()  # another trainer has just sealed an image there
            if waited >= LONG_WAIT_S and not warned:
                warned = True
                self._on_long_wait()
                logger.warning(
                    "Step %d waits for a slot for %s, for up to %.0f s: no image of the steps "
                    "before it is persisted yet. See trinity-sync status",
                    origin.step,
                    component,
                    limit_s,
                )
            if waited >= limit_s:
                raise SpoolError(
                    f"step {origin.step}, role {origin.role}, rank {origin.rank}: {component} is "
                    f"not saved, because every slot is still being written out, or read, after "
                    f"{waited:.0f} s. Is the storage hanging? Later saves try again."
                )
            call_held_handlers()
            time.sleep(0.002)

    def _reserve(
        self, slot: Slot, nbytes: int, slots: list[Slot], free: list[Slot], full: set[Slot]
    ) -> bool:
        """Reserve memory in a locked slot; return False, unlocked, if another of ``slots`` is used.

        It is ``full`` then, also if the training could lack the memory and an image is waited for.
        """
        why = ""
        try:
            if len(free) < len(slots) and slot.reserved < nbytes:
                why = find_shortage(2 * nbytes)
            if not why:
                slot.image(nbytes)
                return True
        except BaseException as error:
            slot.unlock()
            if len(full) + 1 == len(slots) or not isinstance(error, SpoolFullError):
                raise
            why = str(error)
        else:
            slot.unlock()
        full.add(slot)
        logger.info("Waiting for the image in another slot, instead of taking memory: %s", why)
        return False

    def _add_slot(self, origin: Origin, component: str, nbytes: int) -> Slot | None:
        """Add a slot, locked, because all free slots are in use; None if there is no room."""
        slots = self.list_slots(origin.role, component, origin.rank)
        path = self._spool.slot(origin.role, component, origin.rank, len(slots))
        slot = Slot(path)
        if slot.try_lock():
            try:
                if slot.free:
                    slot.image(nbytes)
                    slots.append(slot)
                    return slot
            except SpoolFullError as error:
                logger.warning("cannot add a slot: %s", error)
            slot.unlock()
        slot.close(remove=True)
        return None

    def _look(self, slot: Slot, origin: Origin) -> _Image:
        """Return what is known of the image in ``slot``, for an image of ``origin``."""
        try:
            ticket = read_ticket(slot.path)
        except TicketError:
            return _Image(False, math.inf)
        if slot.failed:
            return _Image(False, math.inf)
        age = ticket.age_s(self._clock()) if ticket else 0.0
        if ticket and ticket.kind != "checkpoint" and not self._is_of_checkpoint(ticket.image):
            again = origin.is_of_step(ticket) and ticket.kind == origin.kind
            return _Image(False, age - min(self._wait_s, WEIGHTS_WAIT_S), again)
        kinds = ("checkpoint", ticket.kind) if ticket and origin.is_of_step(ticket) else ()
        wait_s = min(self._wait_s, WEIGHTS_WAIT_S if self._spool.away.exists() else math.inf)
        return _Image(age < math.inf, age - wait_s, origin.kind in kinds)

    def _is_of_checkpoint(self, image: str) -> bool:
        """Return whether a checkpoint of this process that waits shares an image of weights."""
        return any(
            slot.holds
            and slot.holds.kind == "checkpoint"
            and image in slot.holds.shared.values()
            and not (slot.free or slot.failed)
            for slots in self.slots.values()
            for slot in slots
        )

    def _evict(self, slot: Slot, origin: Origin) -> None:
        """Remove the ticket of the image in ``slot``, which was not persisted in time."""
        ticket = None
        with suppress(TicketError):
            ticket = read_ticket(slot.path)
        age = ticket.age_s(self._clock()) if ticket else math.inf
        if slot.failed:
            why = "its save failed"
        elif math.isinf(age):
            why = "its ticket is corrupted or from before a reboot"
        else:
            why = f"not persisted within {age:.0f} s"
        logger.warning(
            "Evicting unsaved image %s (%s) for step %d: %s, and no slot is free. Look at the "
            "saves of this job: trinity-sync runs; and at what commits them: trinity-sync status",
            slot.path,
            ticket.what if ticket else "unknown",
            origin.step,
            why,
        )
        ticket_path(slot.path).unlink(missing_ok=True)
        failure_path(slot.path).unlink(missing_ok=True)


def _list_free(slots: Iterable[Slot]) -> list[Slot]:
    """Return the free slots; the one with the newest published version comes last."""
    free: list[tuple[tuple[int, int], Slot]] = []
    for slot in slots:
        if slot.free:
            tag = read_version_tag(slot.path) if slot.published else None
            free.append(((tag.run, tag.step) if tag else (0, 0), slot))
    return [*map(itemgetter(1), sorted(free, key=itemgetter(0)))]


BESIDE = "trinity_sync slots"
"""Name of the thread."""
LOOK_S = 0.5
"""Seconds between two looks at memory and commits."""
DENSE = 0.6
"""Part of the time between saves from which on a commit is long: half of it varies by a tenth."""
IDLE_SAVES = 10
"""Saves of a component without its second slot, after which the slot's memory is given back."""

Ended = Callable[[], bool]


class SlotMemory:
    """The memory of the slots of one process. `interrupt` comes before a slot is filled."""

    def __init__(self, pool: SlotPool, folder: Path, clock: Callable[[], float]) -> None:
        self._pool, self._folder, self._clock = pool, folder, clock
        self._filled: dict[SlotKey, tuple[Slot, int, float, float]] = {}
        """Slot and bytes of the newest image of a component, when it was filled (monotonic), and
        from when on its commit is long."""
        self._unused = Counter[Slot]()
        """Images of its component that were filled since a slot was needed."""
        self._was_short = self._is_stalled = self._is_closed = False
        self._start_over()
        _living.add(self)

    def _start_over(self) -> None:
        """Make what a thread needs; a forked child has none, and the locks of its parent's."""
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._works = deque[Callable[[Ended], None]]()
        self._ended.set()

    def map_slots(self, find: Callable[[], Iterable[tuple[str, str, int, int]]]) -> None:
        """Map and touch memory, so that the first save is as fast as later ones.

        ``find``, which the thread calls, returns role, component, rank and bytes of the images. A
        save ends that, and touches the rest. In a process that uses CUDA the memory is page-locked
        as well.
        """

        def work(ended: Ended) -> None:
            for role, component, rank, nbytes in find():
                key = (role, component, rank)
                if key not in self._filled and (slot := self._pool.find_next(*key)):
                    slot.touch(nbytes, ended)

        with hold_handlers():  # which may save
            self._begin([work])

    def look_after(self, filled: list[tuple[SlotKey, Slot, int]]) -> None:
        """Map slots that were filled with so many bytes; look after all until `interrupt`.

        The list is empty afterwards.
        """
        is_fresh = False
        while filled:
            key, slot, nbytes = filled.pop()
            now, last = self._clock(), self._filled.get(key)
            long_at = now + DENSE * (now - last[2]) if last else math.inf
            self._filled[key] = slot, nbytes, now, long_at
            self._unused.update(self._pool.slots[key])
            self._unused[slot] = 0
            is_fresh |= not slot.is_mapped
        self._begin([self._map_filled] if is_fresh else [])

    def interrupt(self) -> None:
        """End what the thread does, and keep it from all slots until the next call."""
        if self._process != os.getpid():
            self._start_over()
        self._ended.set()
        with self._working:
            self._works.clear()

    def close(self) -> None:
        """End the thread."""
        self.interrupt()
        self._is_closed = True
        self._wake.set()
        if self._thread:
            self._thread.join()

    def _begin(self, works: Iterable[Callable[[Ended], None]]) -> None:
        if self._is_closed:
            return
        self._works.extend(works)
        if self._ended.is_set():
            self._ended = threading.Event()
        if self._thread is None or not self._thread.is_alive():
            args = weakref.ref(self), self._wake
            thread = threading.Thread(target=_run, args=args, name=BESIDE, daemon=True)
            with suppress(RuntimeError):  # none can be started: the next save does without it
                thread.start()
                self._thread = thread
        if self._works:
            self._wake.set()

    def run(self, *, looks: bool = True) -> bool:
        """Do all work, and look; return whether to go on. Only the thread and tests call it."""
        ended = self._ended.is_set
        with self._working, _warnings():
            while self._works and not ended():
                self._works.popleft()(ended)
        if looks and not ended():  # without the lock: no save waits for a look
            with _warnings():
                self._map_next(ended)
                self._relieve(ended)
        return not self._is_closed

    def _map_filled(self, ended: Ended) -> None:
        for slot, *_ in [*self._filled.values()]:
            if not slot.is_mapped:
                slot.touch(None, ended)

    def _map_next(self, ended: Ended) -> None:
        """Map the slots of the next images, where those of the newest ones will not be free."""
        for key, (used, nbytes, _, long_at) in [*self._filled.items()]:
            is_long = self._clock() >= long_at and not (used.free or used.failed)
            if not (is_long or used.published):
                continue
            slot = self._pool.find_next(*key)
            has_room = slot and not slot.is_mapped and self._has_room(nbytes - slot.reserved)
            with self._working:
                if ended():  # a save has the slots now
                    return
                self._unused.subtract({each: self._unused[each] for each in self._pool.slots[key]})
                if slot and has_room:
                    slot.touch(nbytes, ended)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether bytes can be had ahead of need: as many stay for a training that grows."""
        if self._was_short or find_shortage(2 * nbytes):
            return False
        left = find_room(self._folder).nbytes - nbytes
        return left >= 0 and left >= measure_ray_stores(self._folder)

    def _relieve(self, ended: Ended) -> None:
        """Give back what saves do without, and all that can be if memory is short.

        While processes wait for memory, once: if they still wait, it is not for this memory, which
        each save would take again.
        """
        with self._working:
            self._give_back([s for s, n in [*self._unused.items()] if n >= IDLE_SAVES], ended)
        shortage = find_shortage()
        is_stall = shortage.startswith(STALL)
        self._is_stalled &= is_stall
        if not shortage or self._is_stalled:
            return
        with self._working:
            nbytes = self._give_back(chain(*self._pool.slots.values()), ended) if not ended() else 0
        if nbytes:
            self._was_short, self._is_stalled = True, is_stall
            logger.warning(
                "Gave back %d bytes of shared memory, because %s; the next save takes new memory, "
                "or fails if there is none. Raise the limit, or train with less",
                *(nbytes, shortage),
            )

    def _give_back(self, slots: Iterable[Slot], ended: Ended) -> int:
        """Return the memory of slots that no reader can want, and the number of its bytes."""
        nbytes = 0
        for slot in slots:
            had = slot.reserved
            if had and not ended() and slot.free and not slot.published and slot.try_lock():
                try:
                    if slot.free and not slot.published:
                        slot.give_back(ended)
                        nbytes += had - slot.reserved
                finally:
                    slot.unlock()
        return nbytes


_living: "weakref.WeakSet[SlotMemory]" = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads before Python does: one that is in torch then would abort the process."""
    for memory in [*_living]:
        memory.close()


@contextmanager
def _warnings() -> Iterator[None]:
    try:
        yield
    except (TrinitySyncError, OSError) as error:
        logger.warning("Saves will be slow, or fail: %s", error)


def _run(memory: "weakref.ref[SlotMemory]", wake: threading.Event) -> None:
    """Run until the memory's owner is closed or gone."""
    lower_thread_priority(10)
    goes_on = True
    while goes_on:
        woken = wake.wait(LOOK_S)
        wake.clear()
        this = memory()
        goes_on = this is not None and this.run(looks=not woken)
        del this
