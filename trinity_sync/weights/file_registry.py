"""The version registry of a reader without Ray: the files of this node and of the root.

Versions in memory are the version tags next to the slots of the job's spool on this node; a version
counts once the images of all its ranks are here. Commits are noticed through the root. The rules
are those of `VersionRegistry`, which is built again at each poll, so a version is gone with its
file.

Images on other nodes are not visible: where ranks of several nodes make a version, it is read from
its commit. No record is kept of the versions that readers serve.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.atomic import read_signature
from trinity_sync.layout import job_id_of
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.spool import JobSpool, require_own_folder
from trinity_sync.storage.runs import list_runs
from trinity_sync.weights.committed import SCAN_S, CommitNotification, Signature
from trinity_sync.weights.versions import Registry, Version, VersionRegistry, make_shard

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds before versions that could not be read are read again."""
TICK_S = 0.1
"""Seconds after which a change to a folder gives it another time. Kernels take file times from a
clock that ticks every 1 to 10 ms."""


class FileRegistry(Registry):
    """Registry of the versions that files name.

    The root may be created later. The spool in ``settings``, by default from the environment, has
    to be the trainer's.
    """

    def __init__(
        self, root: str | Path, *, role: str = "actor", settings: Settings | None = None
    ) -> None:
        self._settings = settings or Settings()
        self._root, self._role = Path(root).resolve(), role
        self._commits = CommitNotification(self._root, role)
        self._spool = self._make_spool(read_identity(root))
        if not self._root.is_dir():
            logger.warning("root %s does not exist yet; waiting for its job", self._root)

    def latest(self) -> Version | None:
        """As `Registry.latest`, on this node.

        Raises:
            CommitError: a run file of the root is torn.
            SpoolError: the spool does not belong to this user alone.
        """
        return self._read_versions().newest(readable=True)

    async def wait_newer(self, than: int | Version, timeout_s: float | None) -> Version | None:
        """As `Registry.wait_newer`.

        Files are read in threads, so the event loop never waits for a disk or a file server.

        Raises:
            CommitError, SpoolError: as `latest`.
        """

        def find(scan: bool = False) -> Version | None:
            return self._read_versions(scan).newer(than, readable=True)

        found = await asyncio.to_thread(find)
        if found is None:
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._wait_next(find), timeout_s)
        return found

    async def _wait_next(self, find: Callable[..., Version | None]) -> Version:
        seen: Signature | None = None
        is_settled = False
        while True:
            signature = await self._commits.wait_for_change(
                seen, SCAN_S if is_settled else TICK_S, lambda: read_signature(self._spool.folder)
            )
            try:
                if found := await asyncio.to_thread(find, scan=is_settled and signature == seen):
                    return found
            except OSError as error:
                logger.warning("cannot read versions of %s, will retry: %s", self._root, error)
                await asyncio.sleep(RETRY_S)
                continue
            # a change within the same tick does not change the signature
            is_settled, seen = signature == seen, signature

    def _read_versions(self, scan: bool = False) -> VersionRegistry:
        identity = read_identity(self._root)
        self._spool = self._make_spool(identity)  # another one once the root was recreated
        with suppress(FileNotFoundError):
            for folder in (self._spool.folder.parent, self._spool.folder):
                require_own_folder(folder)
        runs, versions = list_runs(self._root), VersionRegistry()
        versions.add_runs(runs)
        for slot, tag in self._spool.list_versions(self._role):
            run = versions.runs.get(tag.run)
            if run and tag.run_key in ("", run.key):  # not of a run that the root has lost
                shard = make_shard(tag, slot, self._root, identity)
                if version := versions.add_image(shard, tag.world_size):
                    versions.record(version, 0.0)
        if committed := self._commits.find_newest(runs, scan=scan):
            versions.record(committed, 0.0)
        return versions

    def _make_spool(self, identity: str) -> JobSpool:
        return JobSpool(self._settings.spool / job_id_of(self._root, identity))
