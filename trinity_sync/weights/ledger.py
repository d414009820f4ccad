"""The books on an event loop: who waits is woken by what changes, and what changes is kept on disk.

One condition wakes all; there are no timers but a caller's time-out, and a slow one while somebody
waits, which looks for commits that nobody told of. Files are read and written in threads. A state
file that cannot be written is logged and tried again at the next change: handing weights over does
not depend on it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from trinity_sync.errors import TrinitySyncError
from trinity_sync.storage.runs import Run, all_runs
from trinity_sync.weights.book import Book
from trinity_sync.weights.committed import newest_version
from trinity_sync.weights.files import read_state, write_state
from trinity_sync.weights.parties import Parties
from trinity_sync.weights.version import Version

logger = logging.getLogger(__name__)

LOOK_S = 30.0
"""Seconds between two looks for a commit whose process died before it told of it, or that was made
outside of the Ray cluster."""

T = TypeVar("T")


class Ledger:
    """Book and parties of the job at ``root``; made again, it goes on with what the last one knew.

    Args:
        root: the job's root.
        role: whose weights.
        clock: seconds since the epoch.
        look_s: see `LOOK_S`.
    """

    def __init__(
        self,
        root: str,
        role: str,
        clock: Callable[[], float] = time.time,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self.root, self._role, self._clock, self._look_s = root, role, clock, look_s
        self._changed = asyncio.Condition()
        self._waiting = 0
        self._looks: asyncio.Task[None] | None = None
        self._disk = asyncio.Lock()
        self._written = (-1, -1)
        self.book, self.parties = Book(), Parties()
        self._remember()
        self._learn(self._runs())
        self._record_committed(newest_version(root, role))

    @property
    def number(self) -> int:
        """The newest version's step; 0, the base model, if there is none."""
        newest = self.book.newest()
        return newest.step if newest else 0

    def begin_anew(self) -> None:
        """The root was removed, and with it the versions; who waits waits on."""
        logger.warning("%s was removed and begun anew: its old versions are gone", self.root)
        self.book, self._written = Book(), (-1, -1)

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    async def refresh(self, *, look: bool = False) -> None:
        """Learn of runs that began since; what they left behind is gone then.

        The newest commit is looked for if there are any, or with ``look``.
        """
        if self._learn(await asyncio.to_thread(self._runs)) or look:
            self._record_committed(await asyncio.to_thread(newest_version, self.root, self._role))
            await self.tell()

    async def record(self, version: Version) -> bool:
        """Note a version, wake who waits for it, keep it; whether it is the newest now."""
        is_newest = self.book.record(version, self.now())
        if not is_newest:
            logger.info("version %d of run %d is not the newest", version.step, version.run)
        await self.tell()
        return is_newest

    async def tell(self) -> None:
        """Something may have changed: wake all, and keep it."""
        async with self._changed:
            self._changed.notify_all()
        await self.save()

    async def until(self, answer: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Wait until there is an answer; None if there was none within ``timeout_s``.

        What it rests on is kept by then: whoever has it will not ask again, so a restart must know.
        """
        if answer() is None:
            async with self._changed:
                wait = self._changed.wait_for(lambda: answer() is not None)
                try:
                    with self._looking():
                        await asyncio.wait_for(wait, timeout_s)
                except asyncio.TimeoutError:
                    return None
        await self.save()
        return answer()

    async def save(self) -> None:
        """Write the state file, unless what changed is in it already."""
        async with self._disk:
            changes = (self.book.changes, self.parties.changes)
            if changes == self._written:
                return
            state = {
                "written_at": self.now(),
                "book": self.book.to_json(),
                "parties": self.parties.to_json(),
            }
            try:
                await asyncio.to_thread(write_state, self.root, state)
            except OSError as error:
                logger.warning("the state of the Synchronizer of %s: %s", self.root, error)
            else:
                self._written = changes

    def _remember(self) -> None:
        state = read_state(self.root)
        if state is None:
            return
        try:
            self.book = Book.from_json(state["book"])
            self.parties = Parties.from_json(state["parties"])
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("state.json of %s is begun anew: %r", self.root, error)
            self.book, self.parties = Book(), Parties()

    def _runs(self) -> list[Run]:
        try:
            return all_runs(self.root)
        except (TrinitySyncError, OSError) as error:
            logger.warning("%s", error)
            return []

    def _learn(self, runs: list[Run]) -> bool:
        known = self.book.runs
        anew = any(known.get(run.number, run).key != run.key for run in runs)
        if anew:
            self.begin_anew()
        return self.book.begin_runs(runs) or anew

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Look for commits at times within the block."""
        self._waiting += 1
        if self._looks is None or self._looks.done():
            self._looks = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._look_s)
            try:
                await self.refresh(look=True)
            except (TrinitySyncError, OSError) as error:
                logger.warning("commits of %s cannot be looked at: %s", self.root, error)

    def _record_committed(self, version: Version | None) -> None:
        newest = self.book.newest("checkpoint")
        if version and (newest is None or (newest.run, newest.step) < (version.run, version.step)):
            self.book.record(version, self.now())


def known_root(root: str | Path) -> str:
    """The root as all who name the same folder write it."""
    return str(Path(root).resolve())
