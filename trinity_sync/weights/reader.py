"""Read new versions of the weights in a rollout worker, and load them into a model.

A reader opens the newest version. If the trainer overwrites it meanwhile, the reader opens a newer
one, or the commit of the same step; never parts of two versions, and never an older version than it
had, unless a run has superseded that one. The trainer does not wait for readers.

A registry tells which versions there are: the files of this node's spool and of the root
(`FileRegistry`), which need no Ray, or the job's Synchronizer (``actor_registry``), through
which images of other nodes come by Ray's object store, once for all readers of a node.
"""

import asyncio
import inspect
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.fs.atomic import read_signature
from trinity_sync.layout import check_seconds, check_type, job_id_of
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.spool import JobSpool, require_own_folder
from trinity_sync.storage.runs import is_run_gone, is_superseded, list_runs
from trinity_sync.weights.committed import (
    RETRY_S,
    SCAN_S,
    CommitNotification,
    Signature,
    find_committed_version,
)
from trinity_sync.weights.ray_cluster import find_synchronizer, in_ray_cluster
from trinity_sync.weights.version_view import Target, VersionOpener, VersionView, list_targets
from trinity_sync.weights.versions import (
    ImageCopy,
    Registry,
    Version,
    VersionRegistry,
    VersionUnavailableError,
    make_shard,
)

logger = logging.getLogger(__name__)

MAX_RETRY_S = 0.5
"""Longest pause, in seconds, between two attempts to open a version."""
TICK_S = 0.1
"""Seconds after which a change to a folder gives it another time. Kernels take file times from a
clock that ticks every 1 to 10 ms."""

C = TypeVar("C", bound=Callable[..., Any])


def refuse_unawaited(wait: C) -> C:
    """Have an async method raise if its last call was not awaited, as in a loop that never ends."""

    @wraps(wait)
    def call(reader: Any, *args: Any, **kwargs: Any) -> Any:
        last = vars(reader).pop("_waiting", None)
        if last and inspect.getcoroutinestate(last) == inspect.CORO_CREATED:
            last.close()
            raise ConfigError(
                "wait_newer() has not waited; write `await reader.wait_newer()`, or in plain code "
                "`asyncio.run(reader.wait_newer())`"
            )
        reader._waiting = wait(reader, *args, **kwargs)
        return reader._waiting

    return call  # type: ignore[return-value]


class WeightReader:
    """Reads new versions of a job's weights, for one rollout worker.

    Usage::

        with WeightReader(root="ckpts", name="explorer-0") as reader:
            while await reader.wait_newer():  # without asyncio: while reader.wait():
                reader.load_into(model)

    `load_into` copies into a PyTorch module or a dict of tensors; `iter_weights` yields full
    tensors, for vLLM; `open` pins a version to read it several times. One thread uses a reader.

    Args:
        synchronizer: the job's Synchronizer, a Ray actor, an object that implements `Registry`, or
            the root. By default that of the job at ``root`` if this process has joined its Ray
            cluster; otherwise the files of this node's spool and of the root are read, without Ray.
        name: name of the reader, unique in the job. It appears in reports, and holds its leases.
        root: the job's root; required without a Synchronizer.
        role: role of the weights, as the trainer's `upload` names it; by default that of the
            Synchronizer, or ``actor``.
        dtype: dtype to which floating-point tensors are rounded as they are copied, e.g.
            ``torch.bfloat16`` for a trainer with ``float32`` master weights. Not rounded is what
            `load_into` loads into a ``float32`` tensor, what transformers keeps in ``float32`` in
            the model of a `WeightFolder`, and what ``keep_float32`` names. By default tensors keep
            the trainer's dtypes, and targets have them as well.
        verify: compare the digests of files that are read from a commit, not their sizes alone.
        timeout_s: seconds to look for a version that can be opened before raising.

    Attributes:
        version: the version that was read last; None before the first.

    Raises:
        ConfigError: there is neither ``root`` nor a Synchronizer.
    """

    def __init__(
        self,
        synchronizer: Any = None,
        *,
        name: str,
        root: str | Path | None = None,
        role: str | None = None,
        dtype: torch.dtype | None = None,
        verify: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if isinstance(synchronizer, str | Path):
            synchronizer, root = None, synchronizer
        self._registry = _make_registry(name, synchronizer, root, role or "actor")
        self._role = role
        self._name = name
        self._opener = VersionOpener(name, verify=verify, node=self._registry.node, dtype=dtype)
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self.dtype = dtype
        self.version: Version | None = None

    @refuse_unawaited
    async def wait_newer(
        self, than: int | Version | None = None, timeout_s: float | None = None
    ) -> Version | None:
        """Wait for a version that can be read and is newer than the one read last.

        Once the root was removed and another training has begun there, its versions are newer,
        whatever their steps.

        Args:
            than: version that it has to be newer than, or a step that it has to be beyond; by
                default the version read last. The same step of a later run is newer than a version.
            timeout_s: seconds to wait; None waits without limit.

        Returns:
            The newest version; None at the time-out.

        Raises:
            WeightSyncError: the Synchronizer was stopped, or lost.
            ConfigError: the call before this one was not awaited.
        """
        last = self.version or -1
        return await self._registry.wait_newer(last if than is None else than, timeout_s)

    def wait(
        self, than: int | Version | None = None, timeout_s: float | None = None
    ) -> Version | None:
        """As `wait_newer`, in a program without asyncio, and in a thread with an event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.wait_newer(than, timeout_s))
        with ThreadPoolExecutor(1, "wait-newer") as thread:
            return thread.submit(lambda: asyncio.run(self.wait_newer(than, timeout_s))).result()

    @contextmanager
    def open(
        self, version: Version | None = None, *, keep_float32: Collection[str] = ()
    ) -> Iterator[VersionView]:
        """Open a version, which is neither changed nor removed within the ``with`` block.

        Once the block has ended without an error, the reader counts as serving the version.

        Args:
            version: version to open; by default the newest that can be read. If it is no longer
                available, a newer one is opened; by default, at last, the newest commit.
            keep_float32: names of tensors that are not rounded to the reader's ``dtype``.

        Returns:
            A view of the version (``view.version``), with `VersionView.iter_tensors` and
            `VersionView.load_into`.

        Raises:
            WeightSyncError: no version could be opened within the reader's ``timeout_s``, its
                images do not add up to full tensors, or the version was broadcast.
        """
        check_type("version", version, Version | None, "what wait_newer returns, or nothing")
        deadline = time.monotonic() + self._timeout_s
        wanted = version or self._registry.latest()
        problem, pause_s = "nothing was published", 0.005
        while True:
            is_last = time.monotonic() >= deadline
            for candidate in self._iter_candidates(wanted, version if is_last else wanted):
                with ExitStack() as opened:
                    try:
                        view = opened.enter_context(self._open(candidate, deadline, keep_float32))
                    except VersionUnavailableError as error:
                        problem = str(error)
                        continue
                    yield view
                self.version = view.version
                self._registry.set_serving(self._name, view.version.step, view.version.run)
                return
            if is_last:
                raise WeightSyncError(
                    f"reader {self._name} found no version that it can read within "
                    f"{self._timeout_s:g} s ({problem}). Does the trainer run, and does this "
                    "process see its root and, on the trainer's node, its shared memory?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            wanted = self._registry.latest()

    def iter_weights(
        self, version: Version | None = None, *, keep_float32: Collection[str] = ()
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield names and full tensors of a version, one at a time.

        Names are those of the plain model, without the names of torch's wrappers
        (``torch.compile``, DDP, FSDP1, activation checkpointing); tied tensors come once, under
        their first name. Tensors are on the CPU, in memory of their own. After the last one,
        ``reader.version`` is the version that was read.

        Args:
            version: version to read; by default the newest. If it is no longer available, a newer
                one is read.
            keep_float32: as for `open`.

        Raises:
            WeightSyncError: no version could be opened, see `open`.
        """
        with self.open(version, keep_float32=keep_float32) as view:
            yield from view.iter_tensors()

    def load_into(self, target: Target, version: Version | None = None) -> int:
        """Copy a version into a module or a dict of tensors, on any device.

        Nothing else may use the target meanwhile.

        Args:
            target: module, also in a wrapper of torch, or tensors by name; every parameter and
                buffer is filled. Shapes and dtypes are those of the trainer's full tensors, or the
                reader's ``dtype``.
            version: version to load; by default the newest. If it is no longer available, a newer
                one is loaded.

        Returns:
            Step of the version that the target holds now.

        Raises:
            WeightSyncError: no version could be opened, see `open`; or names, shapes or dtypes
                differ, or a target is a DTensor or on the meta device: nothing was loaded.
        """
        _, state, names = list_targets(target) if self.dtype else (target, {}, {})
        kept = [n for n, k in names.items() if getattr(state[k], "dtype", 0) is torch.float32]
        with self.open(version, keep_float32=kept) as view:
            view.load_into(target)
        return view.version.step

    def close(self) -> None:
        """Unmap the trainer's shared memory."""
        self._opener.close()

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _iter_candidates(self, wanted: Version | None, least: Version | None) -> Iterator[Version]:
        """Yield versions to try, best first; those after the first are not older than ``least``."""
        last = self.version
        if last and wanted and wanted.is_older_than(last):
            lost = is_run_gone(list_runs(last.root), last.run, last.run_key)
            last = None if lost or is_superseded(last.root, last.run, last.step) else last
        if wanted and not (last and wanted.is_older_than(last)):
            yield wanted
        latest = self._registry.latest()
        had = [version for version in (least, last) if version]
        if latest and latest != wanted and not any(map(latest.is_older_than, had)):
            yield latest
        if known := latest or wanted or last:
            committed = find_committed_version(known.root, known.role)
            if committed and not any(map(committed.is_older_than, had)):
                yield committed

    def _open(
        self, version: Version, deadline: float, kept: Collection[str]
    ) -> AbstractContextManager[VersionView]:
        if self._role not in (None, version.role):
            raise ConfigError(
                f"reader {self._name} is for weights of role {self._role!r}, and the Synchronizer "
                f"of {version.root} serves {version.role!r}; start it with that role in "
                "SyncSettings, or read from files, in a process outside of the Ray cluster"
            )
        if version.source == "checkpoint":
            return self._opener.open_checkpoint(version, kept)
        if version.source == "memory":

            def fetch(ranks: Sequence[int]) -> Sequence[ImageCopy]:
                left_s = max(0.0, deadline - time.monotonic())
                return self._registry.fetch_images(version, ranks, left_s)

            return self._opener.open_images(version, fetch, kept)
        raise WeightSyncError(
            f"version {version.step} is broadcast ({version.source}); join the broadcast, or set "
            "the trainer's sync_method to memory or checkpoint"
        )


def make_reader_name(kind: str) -> str:
    """Return a name that no other process has, such as ``vllm-node7-4711``."""
    return f"{kind}-{socket.gethostname()}-{os.getpid()}"


def _make_registry(name: str, synchronizer: Any, root: str | Path | None, role: str) -> Registry:
    if synchronizer is None and in_ray_cluster():
        from trinity_sync.weights.synchronizer import Synchronizer

        synchronizer = find_synchronizer(root) if root else Synchronizer.get_actor()
    if synchronizer is None:
        if root is None:
            raise ConfigError(
                f"reader {name} has to know the job; pass root, the job's folder, or a Synchronizer"
            )
        logger.info("reader %s reads versions of %s from files, without Ray", name, root)
        return FileRegistry(root, role=role)
    ray = sys.modules.get("ray")
    if ray is not None and isinstance(synchronizer, ray.actor.ActorHandle):
        from trinity_sync.weights.actor_registry import ActorRegistry

        return ActorRegistry(synchronizer, root)
    registry: Registry = synchronizer
    return registry


class FileRegistry(Registry):
    """Registry of a reader without Ray: of the versions that files of this node and the root name.

    Versions in memory are the version tags next to the slots of the job's spool on this node; a
    version counts once the images of all its ranks are here. Commits are noticed through the root.
    The rules are those of `VersionRegistry`, which is built again at each poll, so a version is
    gone with its file. Images on other nodes are not visible: where ranks of several nodes make a
    version, it is read from its commit. No record is kept of the versions that readers serve.

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
