"""Leases of readers, and the removal lock.

::

    root/.trinity_sync/
      removal.lock                      shared to acquire a lease or pin, exclusive to remove steps
      leases/40.{random}.json           a reader's lease of step 40 for some seconds

A lease is a file, so it needs no server, and works for every node that sees the root. It is
acquired under the shared lock, and only for a committed step; steps are removed under the exclusive
lock, and only when they are not in use (`pins.list_steps_in_use`). So a reader gets its step or an
error, never a folder that vanishes while it is read. The lease of a reader that died blocks its
step until the lease ends, or until this node sees that the process is gone.
"""

import functools
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import UNWRITABLE, list_uncached, make_folder, remove_file, replace_file
from trinity_sync.fs.locks import LockFile, acquire_file_lock
from trinity_sync.fs.mounts import read_file_system_time
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace
from trinity_sync.fs.records import Count, Record, Seconds, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER, parse_number
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

LEASE_S = 86_400.0
"""Seconds that a lease lasts, for reading a whole step; it ends earlier with its process."""

ACQUIRE_S = 30.0
"""Seconds within which a lease or pin is acquired, even on a slow file server."""


@dataclass(frozen=True)
class _LeaseRecord(Record):
    """Content of the file of a lease."""

    step: Count
    holder: str
    """Name of the reader, for messages."""
    host: str
    """As `read_process_namespace` names it."""
    process: str
    """``pid/start time`` there."""
    ttl_s: Seconds


@dataclass(frozen=True)
class Lease(_LeaseRecord):
    """A lease of a reader on a step."""

    path: Path
    """Path of the file; its mtime is when the lease was acquired."""


@functools.cache
def warn_unwritable(root: Path, why: str) -> None:
    """Log, once a process, that a root, a real path, can be read and not written."""
    logger.warning(
        "%s cannot be written by this process (%s): its steps are read without a lease, so do not "
        "remove them meanwhile, and none can be saved",
        root,
        why,
    )


@contextmanager
def lease_to_read(
    root: str | Path,
    step: int,
    holder: str,
    *,
    ttl_s: float = LEASE_S,
    paths: Collection[str] | None = None,
) -> Iterator[Manifest]:
    """Lease a committed step within the block, for ``ttl_s`` at most, and yield its manifest.

    The step is checked once, under the lock under which it is leased. If it cannot be leased, for
    example on a full disk or in a root that cannot be written, a warning says so. Messages name the
    ``holder``; ``paths`` are as in `require_committed`.

    Raises:
        CommitError: the step is not committed, or corrupted.
        FormatError: another release has made the root or committed the step.
    """
    path = Path(root) / PRIVATE_FOLDER / "leases" / f"{step}.{uuid.uuid4().hex}.json"
    process = read_process_identity(os.getpid())
    lease = _LeaseRecord(step, holder, read_process_namespace(), process, ttl_s)
    with ExitStack() as leased:
        try:
            with prevent_removal(root, step, paths=paths) as manifest:
                make_folder(path.parent)
                replace_file(path, encode_record(lease))
                leased.callback(_release, path, process)
        except OSError as error:
            if error.errno in UNWRITABLE:
                warn_unwritable(Path(root).resolve(), error.strerror)
            else:
                logger.warning(
                    "cannot lease step %d in %s (%s): do not remove it while it is read",
                    step,
                    root,
                    error.strerror,
                )
            manifest = require_committed(root, step, paths=paths)
        yield manifest


def _release(path: Path, process: str) -> None:
    if process != read_process_identity(os.getpid()):
        return  # a child that was forked in the block
    try:
        remove_file(path)
    except OSError as error:  # what was read is good, and on all ranks; the lease ends anyway
        logger.warning("cannot remove %s, which ends by itself: %s", path, error)


def list_leases(root: str | Path, *, clock: Callable[[], float] | None = None) -> list[Lease]:
    """Return the valid leases; remove those that ended or whose process is gone.

    A lease whose file is torn keeps the step in its file name for `LEASE_S`. The time is that of
    the root's file system, unless ``clock`` returns it.
    """
    names = list_uncached(Path(root) / PRIVATE_FOLDER / "leases", "[0-9]*.json")
    paths = [path for path in names if _parse_step(path) is not None]  # others are not leases
    now = clock() if clock else read_file_system_time(root) if paths else 0.0
    found = []
    for path in sorted(paths):
        if lease := _read_valid_lease(path, now):
            found.append(lease)
        else:
            with suppress(OSError):  # in a root that cannot be written it stays
                remove_file(path)
    return found


def acquire_removal_lock(root: str | Path) -> AbstractContextManager[LockFile]:
    """Hold the removal lock within the block, so that no lease or pin is acquired.

    Call `list_leases` and `list_pins` inside, and rename the removed steps before the block ends.

    Raises:
        LockTimeoutError: other processes hold the lock for longer than a lease or pin takes.
            Commits must not wait for them.
    """
    return acquire_file_lock(_removal_lock_path(root), limit_s=ACQUIRE_S)


@contextmanager
def prevent_removal(
    root: str | Path, step: int, *, shared: bool = True, paths: Collection[str] | None = None
) -> Iterator[Manifest]:
    """Prevent the removal of a step within the block, and yield its manifest.

    The step is committed when the block begins. If ``shared``, other leases and pins can be
    acquired meanwhile. ``paths`` are as in `require_committed`.

    Raises:
        CommitError: the step is not committed, or corrupted.
        FormatError: another release has made the root or committed the step.
    """
    read_identity(root)  # which refuses a root of another release
    if not _removal_lock_path(root).exists():  # do not create a root that is not mounted here
        require_committed(root, step, paths=())
    with acquire_file_lock(_removal_lock_path(root), shared=shared):
        yield require_committed(root, step, paths=paths)


def _removal_lock_path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "removal.lock"


def _read_valid_lease(path: Path, now: float) -> Lease | None:
    """Return the lease in a file; None if it has ended or is not a lease."""
    if (step := _parse_step(path)) is None:
        return None
    found = read_record(_LeaseRecord, path)
    try:
        acquired_at = path.lstat().st_mtime
    except FileNotFoundError:
        return None  # released meanwhile
    lease = Lease(step, "unknown (its file is torn)", "", "", LEASE_S, path)
    if found and found.step == step:
        lease = Lease(**vars(found), path=path)
    gone = lease.host == read_process_namespace() and not is_process_alive(lease.process)
    return None if gone or now > acquired_at + lease.ttl_s else lease


def _parse_step(path: Path) -> int | None:
    return parse_number(path.name.partition(".")[0])
