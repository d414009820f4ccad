"""Restore of committed files into states, from the spool if possible, otherwise from disk.

A commit frees the slots, and their content stays until they are filled again. So a trainer that
restarts on its node finds the last committed step in memory. In both cases the bytes are compared
with the digests of the manifest.
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
from trinity_sync.fs.direct_io import READERS, map_fd, open_direct, read_fd
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.deserialize import load_image
from trinity_sync.snapshot.safe_load import is_trusted
from trinity_sync.snapshot.slot_lock import hold_slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.manifest_files import FileRecord

logger = logging.getLogger(__name__)

SLOT_S = 30.0
"""Seconds to wait for a slot that a process is filling; the file is also on disk."""

Source = Literal["spool", "disk"]
Read = tuple[memoryview, bool]
"""The bytes of a file, and whether the file is trusted."""


@dataclass(frozen=True)
class RestoredShard:
    """The state in a shard, and where it was read from."""

    state: Any
    """State as from ``torch.load``, all tensors on the CPU."""
    source: Source
    nbytes: int


def load_shards(
    root: str | Path,
    step: int,
    paths: Sequence[str],
    *,
    spool: JobSpool | None = None,
    borrow: Collection[str] = (),
    manifest: Manifest | None = None,
) -> Generator[RestoredShard, None, None]:
    """Yield the states in shards of a committed step, in order, and read the next ones ahead.

    Files of this user are unpickled as veRL and ``torch.load(weights_only=False)`` do it; files of
    others may contain nothing but tensors and plain values, see ``snapshot.safe_load``.

    ``paths`` are below the step's folder, as in its manifest:
    ``actor/model_world_size_1_rank_0.pt``. Without the ``spool`` of the job on this node, files are
    read from disk. If this rank or another one has checked the ``manifest``, pass it: then no file
    but those of ``paths`` is looked at.

    The caller only copies from the states of ``borrow``, some of the paths. Their tensors may be
    views of the slot, which costs no memory; they are valid until this generator is closed, and the
    slot is locked until then. Close it before the next save.

    Raises:
        CommitError: the step is not committed, a file is not part of it or corrupted, or a file
            that is not trusted contains more than tensors and plain values.
    """
    folder = step_folder(root, step)
    manifest = manifest or require_committed(root, step)
    records = [_find_record(root, manifest, path) for path in paths]
    with ExitStack() as locks, ThreadPoolExecutor(1, thread_name_prefix="restore") as ahead:
        reads = [
            ahead.submit(_read, folder, record, spool, locks if record.path in borrow else None)
            for record in records
        ]
        while reads:  # keep no reference to a state after it was yielded
            yield _unpickle(folder / records[-len(reads)].path, *reads.pop(0).result())


def load_states(
    root: str | Path,
    step: int,
    role: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    spool: JobSpool | None = None,
    manifest: Manifest | None = None,
) -> dict[str, Any]:
    """Return all states that one rank submitted for a role at a committed step, by component.

    Args:
        root: the job's root.
        step: a committed step.
        role: name of the role, e.g. ``actor``.
        rank: number of the rank that submitted the states.
        world_size: number of ranks that saved the role.
        spool: spool of the job on this node, from which files are read if it still has them; None
            reads them from disk.
        manifest: manifest of the step, if it was checked; None reads it, and checks the sizes of
            all files of the step.

    Raises:
        CommitError: the step is not committed, a file is not part of it or corrupted, a file that
            may be another user's contains more than tensors and plain values, or the role has no
            shards of this rank and world size.
        FormatError: another release has committed the step.
    """
    manifest = manifest or require_committed(root, step)
    shards_of_role = [r for r in manifest.files if r.role == role and r.is_shard]
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
            f"{world_size}; load it with as many ranks. FSDPCheckpointManager.load_checkpoint "
            "reshards FSDP states; with DDP, load the state of any rank "
            "(docs/how-to/resharding.md)."
        )
    if not mine:
        raise CommitError(
            f"step {step} in {root} has no shards of role {role} for rank {rank} of {world_size}; "
            f"{manifest.hint_at_format(role)}trinity-sync show {root} {step} lists its files"
        )
    shards = load_shards(root, step, list(mine.values()), spool=spool, manifest=manifest)
    return {component: shard.state for component, shard in zip(mine, shards, strict=True)}


def load_bytes(
    root: str | Path, step: int, path: str, *, manifest: Manifest | None = None
) -> bytes:
    """Return the bytes of one file of a committed step, compared with its digest.

    Other files of the step are not looked at.

    Raises:
        CommitError: as `load_shards`.
    """
    manifest = manifest or require_committed(root, step, paths=[path])
    record = _find_record(root, manifest, path)
    content, _ = _read_from_disk(step_folder(root, step) / path, record)
    return bytes(content)


def _find_record(root: str | Path, manifest: Manifest, path: str) -> FileRecord:
    record = manifest.find_file(path)
    if record is None:
        raise CommitError(
            f"step {manifest.step} in {root} has no file {path}; trinity-sync show {root} "
            f"{manifest.step} lists its files"
        )
    return record


def _unpickle(path: Path, read: Read, source: Source) -> RestoredShard:
    image, trusted = read
    return RestoredShard(load_image(image, path, trusted=trusted), source, len(image))


def _read(
    folder: Path, record: FileRecord, spool: JobSpool | None, locks: ExitStack | None
) -> tuple[Read, Source]:
    start, path = time.perf_counter(), folder / record.path
    read = _read_from_spool(spool, record, locks) if spool else None
    source: Source = "disk" if read is None else "spool"
    if read is None:
        read = _read_from_disk(path, record)
    seconds, gigabytes = time.perf_counter() - start, len(read[0]) / 1e9
    logger.info("%s: %.2f GB from the %s in %.2f s", path, gigabytes, source, seconds)
    return read, source


def _read_from_spool(spool: JobSpool, record: FileRecord, locks: ExitStack | None) -> Read | None:
    """Return the bytes of a file from a slot that still holds them, or None.

    With ``locks``, they are a mapping of the slot, whose lock is added to ``locks``.
    """
    cores = len(os.sched_getaffinity(0))  # unlike reads of a disk, copies want a core each
    for slot in spool.find_cached_slots(record.role, record.component, record.rank, record.digest):
        try:
            with ExitStack() as lock:
                fd = lock.enter_context(hold_slot(slot, limit_s=SLOT_S))
                trusted = is_trusted(fd)
                if locks is None:
                    image, digest = read_fd(fd, record.nbytes, readers=min(READERS, cores))
                else:
                    image, digest = map_fd(fd, record.nbytes)
                if digest == record.digest:
                    if locks is not None:
                        locks.push(lock.pop_all())
                    return image, trusted
        except (OSError, LockTimeoutError) as error:
            logger.warning("cannot read slot %s, reading the file instead: %s", slot, error)
            continue
        logger.warning("slot %s no longer holds %s; reading the file", slot, record.path)
    return None


def _read_from_disk(path: Path, record: FileRecord) -> Read:
    try:
        with open_direct(path) as fd:
            trusted, nbytes = is_trusted(fd), os.fstat(fd).st_size
            image, digest = read_fd(fd, record.nbytes)
    except OSError as error:
        raise make_read_error(path, error) from error
    require_digest(path, record, digest)
    require_size(path, record, nbytes)
    return image, trusted


def make_read_error(path: Path, error: OSError) -> CommitError:
    """Return the error of a file of a step that cannot be read."""
    return CommitError(
        f"{path} cannot be read: {error.strerror}. Repair that, or load another step "
        "(trinity-sync ls lists them)."
    )


def require_size(path: Path, record: FileRecord, nbytes: int) -> None:
    """Require that a file has the size of its record: no digest tells of bytes beyond the end.

    Raises:
        CommitError: the sizes differ.
    """
    if nbytes != record.nbytes:
        raise CommitError(
            f"{path} is corrupted: it has {nbytes:,} bytes, the manifest says {record.nbytes:,}. "
            "Restore the file from a copy, or load another step (trinity-sync ls lists them)."
        )


def require_digest(path: Path, record: FileRecord, found: str) -> None:
    """Require that a file has the digest of its record.

    Raises:
        CommitError: the digests differ.
    """
    if found != record.digest:
        raise CommitError(
            f"{path} is corrupted: its digest is {found}, the manifest says {record.digest}. "
            "Restore the file from a copy, or load another step (trinity-sync ls lists them)."
        )
