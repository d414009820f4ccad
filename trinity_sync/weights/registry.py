"""The version registry on an event loop: changes wake callers that wait, and reach the state file.

One condition wakes all waits; each ends by it or by its time-out. Commits are noticed through the
root (``committed``). Files are read and written in threads. A state file that cannot be
written is logged and written again at the next change: weight sync does not depend on it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from trinity_sync.errors import TrinitySyncError, WeightSyncError
from trinity_sync.layout import job_id_of
from trinity_sync.saves.journal import Entry, Journal
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.runs import Run, list_runs
from trinity_sync.weights.committed import RETRY_S, CommitNotification
from trinity_sync.weights.state_files import SynchronizerState, read_state, write_state
from trinity_sync.weights.sync_barrier import SyncBarrier
from trinity_sync.weights.versions import Version, VersionRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncVersionRegistry:
    """Version registry and sync barrier of the job at ``root``, restored from its state file.

    ``clock`` returns seconds since the epoch.
    """

    def __init__(self, root: str, role: str, clock: Callable[[], float] = time.time) -> None:
        self.root, self.now = root, clock
        self._notification = CommitNotification(root, role)
        self._changed = asyncio.Condition()
        self._disk = asyncio.Lock()
        self._written: SynchronizerState | None = None
        """Content of the state file, without its time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.versions, self.barrier = VersionRegistry(), SyncBarrier()
        self._journal = Journal(root)
        self.identity = read_identity(root)
        self._restore()
        runs = self._runs()
        self.versions.add_runs(runs)
        self._record_committed(self._notification.find_newest(runs))

    @property
    def number(self) -> int:
        """Step of the newest version; 0, the base model, if there is none."""
        newest = self.versions.newest()
        return newest.step if newest else 0

    def reset(self) -> None:
        """Drop all versions, because the root was recreated or restored; callers still wait."""
        logger.warning("%s was recreated: dropping the versions of the old root", self.root)
        self.versions, self._written = VersionRegistry(), None

    async def refresh(self, *, read_commits: bool = False, scan: bool = False) -> None:
        """Read the runs that began since the last call.

        Superseded versions are removed. The newest commit is read if a run began, or with
        ``read_commits`` or ``scan``, which reads the manifests of all commits.
        """
        identity = await asyncio.to_thread(read_identity, self.root)
        if identity and self.identity not in ("", identity):
            self.reset()
            read_commits = True
        self.identity = identity or self.identity
        runs = await asyncio.to_thread(self._runs)
        known = {(run.number, run.key) for run in self.versions.runs.values()}
        if runs and not known <= {(run.number, run.key) for run in runs}:
            self.reset()
        if not self.versions.add_runs(runs) and not read_commits and not scan:
            return
        found = await asyncio.to_thread(self._notification.find_newest, runs, scan=scan)
        self._record_committed(found)
        await self.notify()

    async def find_last_save(self) -> Entry | None:
        """Return what the journal has told last of a save of the newest run; None if nothing."""
        async with self._disk:
            with suppress(OSError):  # it is read again the next time
                await asyncio.to_thread(self._journal.read)
        last = self._journal.find_last()
        return last if last and last.run == self.versions.run else None

    async def follow_commits(self) -> None:
        """Record commits as they appear, without end."""
        seen = None
        while True:
            signature = await self._notification.wait_for_change(seen)
            try:
                await self.refresh(read_commits=True, scan=signature == seen)
            except (TrinitySyncError, OSError) as error:
                logger.warning("cannot read the commits of %s, will retry: %s", self.root, error)
                await asyncio.sleep(RETRY_S)
                continue
            seen = signature

    async def record(self, version: Version) -> bool:
        """Record a version, wake waits, write the state file; return whether it is the newest."""
        is_ours = "" in (self.identity, version.identity) or self.identity == version.identity
        is_newest = is_ours and self.versions.record(version, self.now())
        if not is_newest:
            logger.info("version %d of run %d is not the newest", version.step, version.run)
        await self.notify()
        return is_newest

    async def add_images(self, shard: Version, world_size: int, timeout_s: float) -> Version | None:
        """Add the images of the calling rank to a version, of which each rank uploads its own.

        Return the complete version to the rank that completes it; None to the others, once this
        version or a newer one is recorded.

        Raises:
            WeightSyncError: ranks did not upload their images in time; the message names them.
        """
        key = (shard.run, shard.step)
        if complete := self.versions.add_image(shard, world_size):
            return complete
        if not await self.until(lambda: self._has_reached(key) or None, timeout_s):
            absent = sorted(set(range(world_size)) - self.versions.images.get(key, {}).keys())
            raise WeightSyncError(
                f"ranks {absent} did not upload step {shard.step} within {timeout_s:g} s; all "
                "ranks have to upload, at the same steps"
            )
        return None

    async def notify(self) -> None:
        """Wake all waits after a change, and write the state file."""
        async with self._changed:
            self._changed.notify_all()
        await self.save()

    async def until(self, answer: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Wait until ``answer`` returns a value, and return it; None after the time-out.

        ``answer`` is called after each change. The state file is written before this returns: a
        caller that has its answer does not ask again, so a restart has to know what the answer
        depends on.
        """
        found = answer()

        def is_answered() -> bool:
            nonlocal found
            found = answer()
            return found is not None

        if found is None:
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait_for(is_answered), timeout_s)
                except TimeoutError:
                    return None
        await self.save()  # during which the answer may change
        return found

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task of the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)
        return task

    async def save(self) -> None:
        """Write the state file, unless it is up to date."""
        async with self._disk:
            job = job_id_of(Path(self.root), self.identity)
            state = SynchronizerState(job, self.versions.state, self.barrier.members)
            if state == self._written:
                return
            try:
                now = replace(state, written_at=self.now())
                await asyncio.to_thread(write_state, self.root, now)
            except OSError as error:
                logger.warning("cannot write state.json of %s, will retry: %s", self.root, error)
            else:
                self._written = state

    def _has_reached(self, key: tuple[int, int]) -> bool:
        newest = self.versions.newest("memory")
        recorded = newest is not None and (newest.run, newest.step) >= key
        return recorded or self.versions.is_superseded(*key)

    def _restore(self) -> None:
        state = read_state(self.root)
        if state and state.job == job_id_of(Path(self.root), self.identity):
            self.versions = VersionRegistry(state.registry)  # not that of which the root is a copy
            self.barrier = SyncBarrier(state.members)

    def _runs(self) -> list[Run]:
        try:
            return list_runs(self.root)
        except (TrinitySyncError, OSError) as error:
            logger.warning("%s", error)
            return []

    def _record_committed(self, version: Version | None) -> None:
        if version:
            self.versions.record(version, self.now())
