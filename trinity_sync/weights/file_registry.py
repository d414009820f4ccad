"""The version registry of a reader without Ray: what the files of this node and of the root say.

Versions in memory are the notes beside the slots of the job's spool on this node; a version counts
once the images of all its ranks are here. Commits are noticed through the root. The rules are those
of the Synchronizer's `VersionRegistry`, filled again at each look, so nothing outlives its file.

Images on other nodes are not seen: where ranks of several nodes make a version, it is read from its
commit. Nobody is told which version a reader serves.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.clock import file_time
from trinity_sync.fs.mounts import mount_of
from trinity_sync.layout import job_id
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, require_own_folder
from trinity_sync.snapshot.version_tag import version_tag_path
from trinity_sync.storage.runs import Run, list_runs, run_began_after
from trinity_sync.weights.commit_notification import SCAN_S, CommitMark, CommitNotification
from trinity_sync.weights.delta import Array
from trinity_sync.weights.object_store import Copy, delta_between
from trinity_sync.weights.registry.versions import VersionRegistry
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.version import Gone, ImageRef, Version

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
"""Seconds between two looks at the spool's folder, each one stat in memory: a twentieth of the time
that a process has waited, within these."""
RETRY_S = 1.0
"""Seconds until versions are looked for again that could not be read."""
TICK_S = 0.1
"""Seconds after which a folder that changes has another time than before. Kernels give files the
time of a clock that ticks, every 1 to 10 ms."""

Mark = tuple[tuple[int, int] | None, CommitMark]
"""Of the spool's folder, and of the commits."""


class FileRegistry:
    """See the module.

    Args:
        root: of the job; it may come later.
        role: whose weights.
        settings: name the spool of this node; from the environment by default. The trainer's have
            to name the same.
    """

    node: str | None = None

    def __init__(
        self, root: str | Path, *, role: str = "actor", settings: Settings | None = None
    ) -> None:
        self._settings = settings or Settings()
        self._root, self._role = Path(root).resolve(), role
        self._spool = JobSpool(self._settings.spool / job_id(root))
        self._commits = CommitNotification(self._root, role)
        self._behind_s: float | None = None
        """Seconds by which this node's clock may be behind that of the root's files."""
        if not self._root.is_dir():
            logger.warning("root %s does not exist yet; waiting for its job", self._root)

    def latest(self) -> Version | None:
        """Return the newest version that can be read here.

        Raises:
            CommitError: a run file of the root is torn.
            SpoolError: the spool is not of this user alone.
        """
        return self._read_versions().newest(readable=True)

    async def wait_newer(
        self, than: int, timeout_s: float | None, run: int | None
    ) -> Version | None:
        """Wait until it is beyond step ``than`` of ``run``; None at the time-out.

        The event loop does not wait for a disk or a file server.

        Raises:
            CommitError, SpoolError: as `latest`.
        """
        found = await asyncio.to_thread(self._newer, than, run)
        if found is None:
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._next(than, run), timeout_s)
        return found

    def serving(self, reader: str, step: int, run: int) -> None:
        """Do nothing: there is nobody to tell."""

    def copies(self, version: Version, ranks: Sequence[int], timeout_s: float) -> Sequence[Copy]:
        """Raise `Gone`: images of other nodes come through Ray."""
        raise Gone(
            f"images of ranks {list(ranks)} of version {version.step} are on other nodes; for "
            "those, join the Ray cluster of the job's Synchronizer"
        )

    def deltas(
        self, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
    ) -> Sequence[Array]:
        """Return what turns the images of ``base`` into the version's, made here and now.

        Raises:
            Gone: an image of either is overwritten, or they are of different structure.
        """
        if len(base.images) != len(version.images):
            raise Gone(f"version {version.step} has more or fewer ranks than {base.step}")
        return [
            delta_between(base, version, image.rank, each, nice=self._settings.nice)
            for image, each in zip(version.images, spans, strict=True)
        ]

    def _newer(self, than: int, run: int | None, scan: bool = False) -> Version | None:
        return self._read_versions(scan).newer(than, run, readable=True)

    async def _next(self, than: int, run: int | None) -> Version:
        seen: Mark | None = None
        scan = False
        while True:
            mark = self._images_mark(), await self._commits.look()
            try:
                if found := await asyncio.to_thread(self._newer, than, run, scan):
                    return found
            except OSError as error:
                logger.warning("cannot read versions of %s, will retry: %s", self._root, error)
                await asyncio.sleep(RETRY_S)
                continue
            # within the tick in which the mark was taken, a change does not show in it
            is_settled, seen = mark == seen, mark
            scan = not await self._changed(mark, SCAN_S if is_settled else TICK_S) and is_settled

    async def _changed(self, mark: Mark, within_s: float) -> bool:
        """Return whether notes or commits have changed since the mark, as soon as they have."""
        images, commits = mark
        began = looked = now = time.monotonic()
        while now - began < within_s:
            pause_s = max(SHORTEST_PAUSE_S, (now - began) / 20)
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
            now = time.monotonic()
            if self._images_mark() != images:
                return True
            if now - looked >= self._commits.look_s:
                looked = now
                if await self._commits.look() != commits:
                    return True
        return False

    def _images_mark(self) -> tuple[int, int] | None:
        """Inode and time of the spool's folder, which change as notes come and go."""
        try:
            found = self._spool.folder.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _read_versions(self, scan: bool = False) -> VersionRegistry:
        runs, versions = list_runs(self._root), VersionRegistry()
        versions.add_runs(runs)
        for version in self._in_memory(runs):
            versions.record(version, 0.0)
        if committed := self._commits.newest(runs, scan=scan):
            versions.record(committed, 0.0)
        return versions

    def _in_memory(self, runs: Sequence[Run]) -> Iterator[Version]:
        """Versions of which this node has the images of all ranks."""
        with suppress(FileNotFoundError):
            for folder in (self._spool.folder.parent, self._spool.folder):
                require_own_folder(folder)
        known = {run.number for run in runs}
        found: dict[tuple[int, int, int], dict[int, ImageRef]] = defaultdict(dict)
        for slot, said in self._spool.all_published(self._role):
            if said.run in known and not self._outlived_its_root(slot, said.run):
                image = ImageRef("", str(slot), said.image, said.rank, said.nbytes)
                found[said.run, said.step, said.world_size][said.rank] = image
        for (run, step, world_size), images in found.items():
            if images.keys() == set(range(world_size)):
                refs = tuple(images[rank] for rank in range(world_size))
                yield Version(step, run, "memory", str(self._root), self._role, refs)

    def _outlived_its_root(self, slot: Path, run: int) -> bool:
        """Whether the root was removed and begun again since: its run has another's number."""
        if self._behind_s is None:
            is_shared = mount_of(self._root).shared  # its server has a clock of its own
            self._behind_s = file_time(self._root) - time.time() + 1.0 if is_shared else 0.0
        return run_began_after(self._root, run, version_tag_path(slot), behind_s=self._behind_s)
