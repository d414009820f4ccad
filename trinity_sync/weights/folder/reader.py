"""Read versions that a `WeightFolder` published, complete ones and deltas, on any host."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trinity_sync.errors import DeltaError, RemoteError, WeightSyncError, from_extra
from trinity_sync.fs.atomic import list_paths
from trinity_sync.fs.locks import LockFile
from trinity_sync.weights.folder.bucket import open_bucket
from trinity_sync.weights.folder.delta import apply_delta
from trinity_sync.weights.folder.published import (
    VERSION_FILE,
    PublishedVersion,
    iter_version_folders,
    list_chain,
    read_latest,
    read_version,
    require_checksum,
)
from trinity_sync.weights.reader import refuse_unawaited

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two looks at the marker."""
BUCKET_POLL_S = 2.0
"""The same in an object store, where each is paid for."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PublishedView:
    """The tensors of one published version, as in the files of the model."""

    version: PublishedVersion
    tensors: Tensors
    config: bytes
    """Content of the ``config.json`` with which they were published; empty for an adapter."""

    def list_named(self) -> list[tuple[tuple[str, ...], torch.Size, torch.dtype]]:
        """Return name, shape and dtype of each tensor."""
        return [((name,), tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()]

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU; do not change it."""
        return self.tensors[name]

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors on the CPU; do not change them."""
        yield from self.tensors.items()


class FolderReader:
    """Reads the newest version of a folder that a `WeightFolder` publishes.

    Usage::

        reader = FolderReader("/shared/weights")
        local = WeightFolder("/local/weights", model="path/of/the/model")
        while await reader.wait_newer():
            version = local.publish(reader)  # a complete model on this host's disk

    It keeps the tensors of the version read last, and applies the deltas since then.

    Args:
        out: the folder of the versions, or its URL in an object store.
        cache: with a URL, local folder for the files of the newest version.

    Attributes:
        version: the version that was read last; None before the first.
    """

    def __init__(self, out: str | Path, *, cache: str | Path | None = None) -> None:
        self._where = out
        self._bucket, self._out = open_bucket(out, cache)
        self._tensors: Tensors = {}
        self._config = b""
        self.version: PublishedVersion | None = None

    @refuse_unawaited
    async def wait_newer(self, timeout_s: float | None = None) -> PublishedVersion | None:
        """Wait for a newer version than the one read last.

        Args:
            timeout_s: seconds to wait; None waits without limit.

        Returns:
            The newest version; None at the time-out.

        Raises:
            WeightSyncError: the file that names the newest version was altered.
            RemoteError: the object store cannot be read, and this reader has read no version yet;
                later outages are logged, and waited for.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        told = ""
        while True:
            latest, problem = await asyncio.to_thread(self._look_for_newest)
            if latest and latest != self.version:
                return latest
            if problem and not told:
                logger.warning("waiting: %s", problem)
            told = problem
            if deadline is not None and time.monotonic() >= deadline:
                return None
            await asyncio.sleep(BUCKET_POLL_S if self._bucket else POLL_S)

    def list_versions(self) -> list[PublishedVersion]:
        """Return the versions that are there, in the order in which they were published.

        A step that a later run has published again is there twice.

        Raises:
            WeightSyncError: the record of a version was altered.
            RemoteError: the object store cannot be read.
        """
        if not (latest := self._read_latest()):
            return []
        if self._bucket:
            numbers, read = self._bucket.list_numbers(), self._bucket.read_version
        else:
            numbers = [number for number, _ in iter_version_folders(self._out)]
            read = partial(read_version, self._out)
        found = []
        for number in numbers:
            with suppress(DeltaError):  # it is removed meanwhile
                if number <= latest.version:
                    found.append(read(number))
        return found

    @contextmanager
    def open(self, version: PublishedVersion | None = None) -> Iterator[PublishedView]:
        """Open a version that `list_versions` has returned, by default the newest one.

        Returns:
            Its view, with `PublishedView.iter_tensors`.

        Raises:
            DeltaError: a version is missing, out of order, or torn.
            WeightSyncError: nothing was published, or the weights are not as published.
            RemoteError: the object store cannot be read.
        """
        is_reread = False
        while True:
            latest = version or self._read_latest()
            if latest is None:
                raise WeightSyncError(f"nothing was published in {self._where}; wait_newer waits")
            try:
                self._read(latest)
                break
            except (WeightSyncError, RemoteError, FileNotFoundError) as error:
                if not version and self._read_latest() != latest:
                    continue  # it was removed after a newer one
                if is_reread or isinstance(error, RemoteError):
                    raise
                self._drop()
                is_reread = True
        yield PublishedView(latest, self._tensors, self._config)

    def load(self, version: PublishedVersion | None = None) -> Tensors:
        """Return the tensors of a version, by default the newest one; do not change them.

        Args:
            version: one that `list_versions` has returned. After another one of its chain was read,
                only the deltas between them are.

        Raises:
            DeltaError, WeightSyncError: as `open`.
        """
        with self.open(version) as view:
            return view.tensors

    def _look_for_newest(self) -> tuple[PublishedVersion | None, str]:
        """Return the newest version, or why there is none."""
        try:
            latest = self._read_latest()
        except RemoteError as error:
            if self.version is None:  # the URL or the credentials may be wrong
                raise
            return None, str(error)
        return latest, "" if latest else f"nothing was published in {self._where} yet"

    def _read_latest(self) -> PublishedVersion | None:
        return self._bucket.read_latest() if self._bucket else read_latest(self._out)

    def _drop(self) -> None:
        """Drop what was read before, in memory and in the cache: that may be what is corrupted."""
        self._tensors, self.version = {}, None
        if self._bucket:
            self._bucket.clear_cache()

    def _read(self, latest: PublishedVersion) -> None:
        if latest == self.version:
            return
        if self._bucket:
            self._bucket.fetch(latest)
        chain = list_chain(self._out, read_version(self._out, latest.version))
        if self.version in chain:
            tensors, config = self._tensors, self._config
            chain = chain[chain.index(self.version) :]
        else:
            with suppress(OSError):  # a file system without locks: prune may remove the chain
                self._open_chain = LockFile(chain[0].folder / VERSION_FILE, os.O_RDONLY)
                self._open_chain.try_acquire(shared=True)
            tensors = _load_complete(chain[0].folder)
            path = chain[0].folder / "config.json"
            config = path.read_bytes() if path.exists() else b""
        for version in chain[1:]:
            tensors = apply_delta(tensors, version.folder)
        require_checksum(latest, tensors)
        self._tensors, self._config, self.version = tensors, config, latest


def verify_version(version: PublishedVersion) -> None:
    """Require that a complete version is as it was published, to the last bit.

    Raises:
        WeightSyncError: it is torn, altered, or a delta.
    """
    if version.base is not None:
        raise WeightSyncError(f"{version.folder} is a delta; read it with FolderReader")
    require_checksum(version, _load_complete(version.folder))


def _load_complete(folder: Path) -> Tensors:
    with from_extra("hf"):
        from safetensors import SafetensorError
        from safetensors.torch import load
    found: Tensors = {}
    try:
        for path in list_paths(folder, "*.safetensors"):
            # not mapped: a removed file's page that has to be read again would end the process
            found.update(load(path.read_bytes()))
    except SafetensorError as error:
        raise WeightSyncError(
            f"{folder} is torn or altered ({error}); publish the step again"
        ) from error
    return found
