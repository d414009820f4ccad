"""Notification of commits of weights through files alone, in any process, with or without Ray.

A commit replaces the manifest of its step, then the latest pointer. Two stats tell whether either
file was replaced, and only then is anything read. The pointer says where to look first; manifests
decide, so an empty, torn or late pointer costs a scan of all manifests and nothing else. A commit
only moves the pointer forward: no commit is newer than the one it names, except one that died
before it moved the pointer.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.fs.changes import FileSignature, read_signature
from trinity_sync.fs.mounts import find_mount
from trinity_sync.layout import ITERATION_FILES, MANIFEST, step_folder
from trinity_sync.snapshot.job_identity import IDENTITY_FILE
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.runs import Run
from trinity_sync.weights.committed import find_committed_version, find_newest_version
from trinity_sync.weights.version import Version

POLL_S = 0.1
"""Seconds between two polls of a root that no other node sees."""
SHARED_POLL_S = 1.0
"""Seconds between two polls of a shared file system, whose server answers each of them."""
SCAN_S = 30.0
"""Seconds between two scans of all manifests: a commit may die before it moves the pointer."""

CommitSignature = tuple[FileSignature, FileSignature, FileSignature]
"""Of the latest pointer, of the manifest of the step that it names, and of the job's identity."""


class CommitNotification:
    """Notices changes of the newest committed weights of a role, and finds them.

    Any number of threads may use it. The root may be created later.
    """

    def __init__(self, root: str | Path, role: str) -> None:
        self._root, self._role = Path(root), role
        self._is_shared = find_mount(root).shared
        self.poll_s = SHARED_POLL_S if self._is_shared else POLL_S
        """Seconds between two polls of a process that waits."""
        self._pointer = self._root / ITERATION_FILES["state_dict"]
        self._pointed: tuple[FileSignature, int | None] = (None, None)
        """The pointer that was read last, and the step that it names."""
        self._cached: tuple[tuple[CommitSignature, frozenset[Run]], Version | None] | None = None

    def read_signature(self) -> CommitSignature:
        """Return a signature that changes with every commit of weights, and with the job."""
        identity = self._read_file_signature(self._root / IDENTITY_FILE)
        pointer = self._read_file_signature(self._pointer)
        known, step = self._pointed
        if pointer != known:
            step = None
            with suppress(OSError):
                step = read_latest_pointer(self._root, "state_dict")
            self._pointed = pointer, step
        if step is None:
            return pointer, None, identity
        manifest = step_folder(self._root, step) / MANIFEST
        return pointer, self._read_file_signature(manifest), identity

    def find_newest(self, runs: Iterable[Run], *, scan: bool = False) -> Version | None:
        """Return the newest committed version that no later run has superseded.

        ``runs`` are all runs of the job. Nothing is read unless there was a commit or a run began.
        The first call, and any with ``scan``, reads all manifests.
        """
        state = self.read_signature(), frozenset(runs)
        cached = self._cached
        if cached and cached[0] == state and not scan:
            return cached[1]
        found, step = None, self._pointed[1]
        if cached and not scan and step is not None:
            found = find_committed_version(self._root, self._role, step)
        if found is None:
            found = find_newest_version(self._root, self._role)
        self._cached = state, found
        return found

    async def poll(self) -> CommitSignature:
        """Return the signature; a file server, which may be slow, is asked in a thread."""
        if self._is_shared:
            return await asyncio.to_thread(self.read_signature)
        return self.read_signature()

    async def wait_for_change(self, since: CommitSignature | None) -> CommitSignature:
        """Wait until the signature differs from ``since``, or a scan is due; return it."""
        scan_at = time.monotonic() + SCAN_S
        while True:
            signature = await self.poll()
            if signature != since or time.monotonic() >= scan_at:
                return signature
            await asyncio.sleep(self.poll_s)

    def _read_file_signature(self, path: Path) -> FileSignature:
        if self._is_shared:
            revalidate_folder(path.parent)
        return read_signature(path)
