"""The books on an event loop: who waits is woken by what changes, and what changes is kept on disk.

One condition wakes all; a caller's wait ends by it or by its time-out. Commits are noticed through
the root (``commit_notification``). Files are read and written in threads. A state file that cannot
be written is logged and tried again at the next change: handing weights over does not depend on it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

from trinity_sync.errors import TrinitySyncError
from trinity_sync.storage.runs import Run, all_runs
from trinity_sync.weights.book import Book
from trinity_sync.weights.commit_notification import CommitNotification
from trinity_sync.weights.parties import Parties
from trinity_sync.weights.state_files import read_state, write_state
from trinity_sync.weights.version import Version

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until commits are looked at again that could not be read."""

T = TypeVar("T")


class Ledger:
    """Book and parties of the job at ``root``; made again, it goes on with what the last one knew.

    Args:
        root: the job's root.
        role: whose weights.
        clock: seconds since the epoch.
    """

    def __init__(self, root: str, role: str, clock: Callable[[], float] = time.time) -> None:
        self.root, self._clock = root, clock
        self._notification = CommitNotification(root, role)
        self._changed = asyncio.Condition()
        self._disk = asyncio.Lock()
        self._written = (-1, -1)
        self.book, self.parties = Book(), Parties()
        self._remember()
        runs = self._runs()
        self._learn(runs)
        self._record_committed(self._notification.newest(runs))

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

    async def refresh(self, *, look: bool = False, scan: bool = False) -> bool:
        """Learn of runs that began since; what they left behind is gone then.

        The newest commit is looked for if there are any, or with ``look``, or with ``scan`` in all
        manifests.

        Returns:
            Whether there is a newer commit than before.
        """
        runs = await asyncio.to_thread(self._runs)
        if not self._learn(runs) and not look and not scan:
            return False
        found = await asyncio.to_thread(self._notification.newest, runs, scan=scan)
        is_newer = self._record_committed(found)
        await self.tell()
        return is_newer

    async def commits(self) -> AsyncIterator[None]:
        """Record commits as they come, without end; each item is a newer one."""
        seen = None
        while True:
            mark = await self._notification.changed(seen)
            try:
                is_newer = await self.refresh(look=True, scan=mark == seen)
            except (TrinitySyncError, OSError) as error:
                logger.warning("cannot read the commits of %s, will retry: %s", self.root, error)
                await asyncio.sleep(RETRY_S)
                continue
            seen = mark
            if is_newer:
                yield

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

    def _record_committed(self, version: Version | None) -> bool:
        newest = self.book.newest("checkpoint")
        if version is None:
            return False
        if newest and (newest.run, newest.step) >= (version.run, version.step):
            return False
        self.book.record(version, self.now())
        return True


def known_root(root: str | Path) -> str:
    """The root as all who name the same folder write it."""
    return str(Path(root).resolve())
