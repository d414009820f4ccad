"""Restore of a committed step into tensors that live: one copy, and no memory besides theirs.

Bytes reach a tensor before the digest of their file is known, so an error on the way says which
components have changed. Everything that can be checked earlier is: all files are opened, and their
tensors compared with the live ones, before the first is filled.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from trinity_sync.errors import CommitError, ConfigError, LockTimeoutError
from trinity_sync.fs.direct_io import (
    READERS,
    digest_fd,
    map_fd,
    open_direct,
    read_fd,
    scatter_fd,
)
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import hold_slot
from trinity_sync.storage.manifest import FileRecord, Manifest
from trinity_sync.storage.restore import (
    SLOT_S,
    find_own_shards,
    make_read_error,
    require_digest,
    require_size,
)
from trinity_sync.tensors.deserialize import load_image
from trinity_sync.tensors.in_place import plan_copies, plan_filling
from trinity_sync.tensors.safe_load import is_plain_forced, is_trusted

logger = logging.getLogger(__name__)


def fill_states(
    root: str | Path,
    manifest: Manifest,
    role: str,
    live: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    run_together: Callable[[Callable[[], None]], object] = lambda work: work(),
) -> dict[str, Any]:
    """Fill live states, by component, from a step, and return those of the step.

    Live tensors are in the place of the saved ones. What has to succeed on all ranks before any of
    them goes on is passed to ``run_together``.

    Raises:
        CommitError: as `load_states`; the message says which components have changed.
        ConfigError: the step has no such component, or other tensors; nothing was changed.
    """
    folder, shards = step_folder(root, manifest.step), list[_LiveShard]()

    def open_all() -> None:
        records = find_own_shards(root, manifest, role, rank, world_size)
        if unknown := sorted(live.keys() - records.keys()):
            raise ConfigError(
                f"step {manifest.step} in {root}, role {role}, has no component "
                f"{', '.join(unknown)} to fill: it has {', '.join(records)}"
            )
        for name, state in live.items():
            shards.append(shard := _LiveShard(folder, records[name], state, spool))
            opened.callback(shard.close)
            shard.open()

    with ExitStack() as opened:
        run_together(open_all)
        run_together(lambda: _fill_all(shards))
        return {shard.component: shard.state for shard in shards}


def _fill_all(shards: "Sequence[_LiveShard]") -> None:
    for number, shard in enumerate(shards):
        try:
            shard.fill()
        except Exception as error:
            done, rest = (
                ", ".join(each.component for each in part) or "none"
                for part in (shards[:number], shards[number + 1 :])
            )
            raise CommitError(
                f"{error} Tensors of {shard.component} have changed and hold no step's state; "
                f"filled before: {done}; unchanged: {rest}."
            ) from error


class _LiveShard:
    """The shard of one component, and the live state that is filled from it.

    It comes from the first slot that holds it, or else from its file.
    """

    def __init__(self, folder: Path, record: FileRecord, live: Any, spool: JobSpool | None) -> None:
        self.component = record.component
        self._path, self._record, self._live = folder / record.path, record, live
        key = record.role, record.component, record.digest
        self._slots = iter(spool.find_cached_slots(*key) if spool else ())
        self._opened = ExitStack()
        self._slot: Path | None = None

    @property
    def state(self) -> Any:
        """The state of the step, with live tensors at the places of those that they are."""
        return self._plan.state

    def open(self) -> None:
        """Open the next source, and compare its tensors with the live ones.

        Raises:
            CommitError: it is the file, which is corrupted or cannot be read.
            ConfigError: the tensors differ.
        """
        for slot in self._slots:
            try:
                self._plan_from(hold_slot(slot, limit_s=SLOT_S))
                self._slot = slot
                return
            except (OSError, LockTimeoutError, CommitError) as error:
                logger.warning("cannot read slot %s, reading the file instead: %s", slot, error)
        self._slot = None
        try:
            self._plan_from(open_direct(self._path))
            require_size(self._path, self._record, os.fstat(self._fd).st_size)
        except OSError as error:
            raise make_read_error(self._path, error) from error

    def _plan_from(self, source: AbstractContextManager[int]) -> None:
        self.close()
        self._fd = fd = self._opened.enter_context(source)
        self._is_read = False
        trusted = is_trusted(fd) and not is_plain_forced()
        if trusted:
            try:
                self._plan = plan_filling(map_fd(fd, self._record.nbytes), self._live)
                return
            except ConfigError:
                raise
            except Exception as error:  # bytes that are not yet compared may raise anything
                logger.info("%s cannot be read in place: %s", self._path, error)
        image, digest = read_fd(fd, self._record.nbytes)
        require_digest(self._path, self._record, digest)
        self._plan = plan_copies(load_image(image, self._path, trusted=trusted), self._live)
        self._is_read = True

    def fill(self) -> None:
        """Fill the live state.

        Raises:
            CommitError: the file is corrupted, or cannot be read.
        """
        start, nbytes = time.perf_counter(), self._record.nbytes
        while not self._is_read:
            try:
                digest = self._read()
            except OSError as error:
                if not self._slot:
                    raise make_read_error(self._path, error) from error
                digest = f"unknown: {error.strerror}"
            if self._slot and digest != self._record.digest:
                logger.warning(
                    "slot %s no longer holds %s; reading the file", self._slot, self._path
                )
                self.open()
                continue
            require_digest(self._path, self._record, digest)
            break
        self._plan.finish()
        seconds, source = time.perf_counter() - start, "spool" if self._slot else "disk"
        logger.info("%s: %.2f GB from the %s in %.2f s", self._path, nbytes / 1e9, source, seconds)

    def _read(self) -> str:
        """Read all bytes to where they belong, and return their digest."""
        if self._slot and self._plan.is_in_memory:
            cores = len(os.sched_getaffinity(0))  # a copy wants a core, a disk several readers
            readers = min(READERS, cores + 1)
            return scatter_fd(self._fd, self._record.nbytes, self._plan.places, readers=readers)
        return digest_fd(self._fd, self._record.nbytes, take=self._plan.put)

    def close(self) -> None:
        """Close what is open."""
        self._opened.close()
