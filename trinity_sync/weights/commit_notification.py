"""Commits of weights, noticed by files alone: in whatever process, with or without Ray.

A commit replaces the manifest of its step, then the latest pointer. Two stats tell whether either
is another file than before, and only then is anything read. The pointer says where to look first;
manifests decide, so an empty, torn or late pointer costs a scan of all of them and nothing else.
A commit moves the pointer forward only: no other is newer than the commit that it names, but for
one that died before it moved the pointer.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.fs.mounts import mount_of
from trinity_sync.layout import ITERATION_FILES, MANIFEST, step_folder
from trinity_sync.storage.latest_pointer import read_iteration
from trinity_sync.storage.runs import Run
from trinity_sync.weights.committed import newest_version, version_of_step
from trinity_sync.weights.version import Version

LOOK_S = 0.1
"""Seconds between two looks at a root that no other node sees."""
SHARED_LOOK_S = 1.0
"""The same on a shared file system, whose server answers each look."""
SCAN_S = 30.0
"""Seconds between two scans of all manifests: a commit may die before it moves the pointer."""

FileMark = tuple[int, int, int] | None
"""Inode, size and time of a file; None if there is none."""
CommitMark = tuple[FileMark, FileMark]
"""Of the latest pointer, and of the manifest of the step that it names."""


class CommitNotification:
    """Tells when the newest committed weights of a role may have changed, and what they are.

    Any number of threads may use it.

    Args:
        root: of the job; it may come later.
        role: whose weights.
    """

    def __init__(self, root: str | Path, role: str) -> None:
        self._root, self._role = Path(root), role
        self._is_shared = mount_of(root).shared
        self.look_s = SHARED_LOOK_S if self._is_shared else LOOK_S
        """Seconds between two looks of a process that waits."""
        self._pointer = self._root / ITERATION_FILES["state_dict"]
        self._pointed: tuple[FileMark, int | None] = (None, None)
        """The pointer that was read last, and the step that it names."""
        self._known: tuple[tuple[CommitMark, frozenset[Run]], Version | None] | None = None

    def mark(self) -> CommitMark:
        """Look: two marks differ if there was a commit of weights between them."""
        pointer = self._mark_of(self._pointer)
        seen, step = self._pointed
        if pointer != seen:
            step = None
            with suppress(OSError):
                step = read_iteration(self._root, "state_dict")
            self._pointed = pointer, step
        if step is None:
            return pointer, None
        return pointer, self._mark_of(step_folder(self._root, step) / MANIFEST)

    def newest(self, runs: Iterable[Run], *, scan: bool = False) -> Version | None:
        """Return the newest committed version that none of ``runs``, all of the job's, supersedes.

        Nothing is read unless there was a commit or a run began. With ``scan``, and the first time,
        all manifests are read.
        """
        state = self.mark(), frozenset(runs)
        known = self._known
        if known and known[0] == state and not scan:
            return known[1]
        found, step = None, self._pointed[1]
        if known and not scan and step is not None:
            found = version_of_step(self._root, self._role, step)
        if found is None:
            found = newest_version(self._root, self._role)
        self._known = state, found
        return found

    async def look(self) -> CommitMark:
        """Return the mark; a file server is asked in a thread, since it may be slow or away."""
        return await asyncio.to_thread(self.mark) if self._is_shared else self.mark()

    async def changed(self, since: CommitMark | None) -> CommitMark:
        """Wait until the mark is another than ``since``, or a scan is due; return the mark."""
        scan_at = time.monotonic() + SCAN_S
        while True:
            mark = await self.look()
            if mark != since or time.monotonic() >= scan_at:
                return mark
            await asyncio.sleep(self.look_s)

    def _mark_of(self, path: Path) -> FileMark:
        if self._is_shared:
            revalidate_folder(path.parent)
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
