"""Look after the memory of a process's slots, in a thread of low priority beside the training.

It maps what the next image fills: the first one's memory, and a second slot once commits take more
than half of the time between saves, or readers have the first. It gives back slots that saves do
without, and while memory is short all that is committed and that no reader can want.
"""

import logging
import math
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from trinity_sync.errors import TrinitySyncError
from trinity_sync.fs.memory import STALL, find_room, find_shortage, measure_ray_stores
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.slot_pool import SlotKey, SlotPool

logger = logging.getLogger(__name__)

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

    def _start_over(self) -> None:
        """Make what a thread needs; a forked child has none, and the locks of its parent's."""
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._works = deque[Callable[[Ended], None]]()
        self._ended.set()

    def map_slots(self, find: Callable[[], Iterable[tuple[str, str, int, int]]]) -> None:
        """Map memory for first images; ``find``, which the thread calls, is as in `prewarm`."""

        def work(ended: Ended) -> None:
            for role, component, rank, nbytes in find():
                key = (role, component, rank)
                if key not in self._filled and (slot := self._pool.find_next(*key)):
                    slot.touch(nbytes, ended)

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


@contextmanager
def _warnings() -> Iterator[None]:
    try:
        yield
    except (TrinitySyncError, OSError) as error:
        logger.warning("Saves will be slow, or fail: %s", error)


def _run(memory: "weakref.ref[SlotMemory]", wake: threading.Event) -> None:
    """Run until the memory's owner is closed or gone."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread
    goes_on = True
    while goes_on:
        woken = wake.wait(LOOK_S)
        wake.clear()
        this = memory()
        goes_on = this is not None and this.run(looks=not woken)
        del this
