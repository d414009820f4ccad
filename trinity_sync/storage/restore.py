"""Committed files back into states: from the spool if their images are still there, or from disk.

A commit frees the slots, and what was in them stays until they are filled again. So a trainer that
is started again on its node finds the step that it was killed after in memory. Either way the bytes
are those that the manifest names, digest and all, or they are not taken.
"""

import logging
import os
import time
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trinity_sync.errors import CommitError, LockTimeoutError
from trinity_sync.fs.direct_io import READERS, map_open, opened, read_open
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.deserialize import load_image
from trinity_sync.snapshot.safe_load import is_trusted
from trinity_sync.snapshot.slot_lock import hold_slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import FileRecord, Manifest

logger = logging.getLogger(__name__)

SLOT_S = 30.0
"""Seconds to wait for a slot that a process is filling; the file is on disk, too."""

Source = Literal["spool", "disk"]
Read = tuple[memoryview, bool]
"""The bytes of a file, and whether the file that they were read from is trusted."""


@dataclass(frozen=True)
class RestoredShard:
    """The state in one shard, and where it was read from."""

    state: Any
    """As ``torch.load`` gives it, all tensors on the CPU, in one piece of memory a shard."""
    source: Source
    nbytes: int


def load_shards(
    root: str | Path,
    step: int,
    paths: Sequence[str],
    *,
    spool: JobSpool | None = None,
    borrow: Collection[str] = (),
) -> Generator[RestoredShard, None, None]:
    """The states in shards of a committed step, in order; each is read while those before are used.

    Files of this user are unpickled as veRL and ``torch.load(weights_only=False)`` do it; from
    those of others nothing but tensors and plain values is taken, see ``snapshot.safe_load``.

    Args:
        root: the job's folder.
        step: a committed one.
        paths: below the step's folder, as in its manifest: ``actor/model_world_size_1_rank_0.pt``.
        spool: of the job on this node; without it, files are read from disk.
        borrow: those of the paths whose states are only copied from. Their tensors may be the slot
            itself, which costs no memory; they are good until this generator is closed, and so
            long the slot is locked. Close it before the next save.

    Raises:
        CommitError: the step is not committed, a file is not part of it, one is corrupted, or one
            that is not trusted holds more than tensors and plain values.
    """
    manifest = require_committed(root, step)
    folder = step_folder(root, step)
    records = [_record(root, manifest, path) for path in paths]
    with ExitStack() as locks, ThreadPoolExecutor(1, thread_name_prefix="restore") as ahead:
        reads = [
            ahead.submit(_read, folder, record, spool, locks if record.path in borrow else None)
            for record in records
        ]
        while reads:  # of what was yielded, nothing is kept here while the next one is waited for
            yield _loaded(folder / records[-len(reads)].path, *reads.pop(0).result())


def load_states(
    root: str | Path,
    step: int,
    role: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
) -> dict[str, Any]:
    """All states that one rank handed over for a role at a committed step, by component.

    Args and errors are those of `load_shards`.
    """
    shards_of_role = [
        r for r in require_committed(root, step).files if r.role == role and r.is_shard
    ]
    mine = {
        record.component: record.path
        for record in shards_of_role
        if (record.rank, record.world_size) == (rank, world_size)
    }
    saved_by = {record.world_size for record in shards_of_role}
    if saved_by and world_size not in saved_by:
        ranks = " and ".join(f"{number} rank(s)" for number in sorted(saved_by))
        raise CommitError(
            f"step {step} in {root}, role {role}, was saved by {ranks}, and this is rank {rank} of "
            f"{world_size}; load it with as many. States of FSDP are resharded where "
            "FSDPCheckpointManager.load_checkpoint loads them (docs/resharding.md), a replica of "
            "DDP is that of any rank (docs/tutorials/ddp.md)."
        )
    if not mine:
        raise CommitError(
            f"step {step} in {root} has no shards of role {role} for rank {rank} of {world_size}; "
            f"trinity-sync show {root} {step} lists what it has"
        )
    shards = load_shards(root, step, list(mine.values()), spool=spool)
    return {component: shard.state for component, shard in zip(mine, shards, strict=True)}


def load_bytes(root: str | Path, step: int, path: str) -> bytes:
    """The bytes of one file of a committed step, below its folder, with its digest compared.

    Raises:
        CommitError: as `load_shards`.
    """
    record = _record(root, require_committed(root, step), path)
    content, _ = _from_disk(step_folder(root, step) / path, record)
    return bytes(content)


def _record(root: str | Path, manifest: Manifest, path: str) -> FileRecord:
    record = manifest.file(path)
    if record is None:
        raise CommitError(
            f"step {manifest.step} in {root} has no file {path}; trinity-sync show {root} "
            f"{manifest.step} lists what it has"
        )
    return record


def _loaded(path: Path, read: Read, source: Source) -> RestoredShard:
    image, trusted = read
    return RestoredShard(load_image(image, path, trusted=trusted), source, len(image))


def _read(
    folder: Path, record: FileRecord, spool: JobSpool | None, locks: ExitStack | None
) -> tuple[Read, Source]:
    start, path = time.perf_counter(), folder / record.path
    read = _from_spool(spool, record, locks) if spool else None
    source: Source = "disk" if read is None else "spool"
    if read is None:
        read = _from_disk(path, record)
    seconds, gigabytes = time.perf_counter() - start, len(read[0]) / 1e9
    logger.info("%s: %.2f GB from the %s in %.2f s", path, gigabytes, source, seconds)
    return read, source


def _from_spool(spool: JobSpool, record: FileRecord, locks: ExitStack | None) -> Read | None:
    """The file's bytes from a slot that still holds them; None if there is none.

    With ``locks``, they are the slot's own, whose lock goes there.
    """
    cores = len(os.sched_getaffinity(0))  # unlike reads of a disk, copies want a core each
    for slot in spool.kept(record.digest):
        try:
            with ExitStack() as lock:
                fd = lock.enter_context(hold_slot(slot, limit_s=SLOT_S))
                trusted = is_trusted(fd)
                if locks is None:
                    image, digest = read_open(fd, record.nbytes, readers=min(READERS, cores))
                else:
                    image, digest = map_open(fd, record.nbytes)
                if digest == record.digest:
                    if locks is not None:
                        locks.push(lock.pop_all())
                    return image, trusted
        except (OSError, LockTimeoutError) as error:
            logger.warning("%s cannot be read, its file is: %s", slot, error)
            continue
        logger.warning("%s does not hold %s any more; the file is read", slot, record.path)
    return None


def _from_disk(path: Path, record: FileRecord) -> Read:
    try:
        with opened(path) as fd:
            trusted = is_trusted(fd)
            image, digest = read_open(fd, record.nbytes)
    except OSError as error:
        raise CommitError(
            f"{path} cannot be read: {error.strerror}. Mend that, or load another step "
            "(trinity-sync ls shows them)."
        ) from error
    require_digest(path, record, digest)
    return image, trusted


def require_digest(path: Path, record: FileRecord, found: str) -> None:
    """See that a file that was read has the digest of its record.

    Raises:
        CommitError: it has not.
    """
    if found != record.digest:
        raise CommitError(
            f"{path} is corrupted: its digest is {found}, the manifest says {record.digest}. "
            "Restore the file from a copy, or load another step (trinity-sync ls shows them)."
        )
