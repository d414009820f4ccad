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

import msgspec

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.atomic import UNWRITABLE, list_uncached, make_folder, replace_file
from trinity_sync.fs.locks import LockFile, acquire_file_lock, try_acquire_file_lock
from trinity_sync.fs.mounts import read_file_system_time
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace
from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, parse_number
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""Default seconds that a lease lasts unless it is renewed."""
LONG_LEASE_S = 86_400.0
"""Seconds that a lease for reading a whole step lasts; it ends earlier with its process."""

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
    """A lease of a reader on a step; a context manager that releases it."""

    path: Path
    """Path of the file; its mtime is when the lease was acquired or renewed."""

    def renew(self) -> None:
        """Restart the time of the lease, even if it has ended, as long as its step exists.

        Raises:
            CommitError: the lease had ended, and it or its step was removed.
        """
        root = self.path.parents[2]
        try:
            # no lease is removed meanwhile
            with acquire_file_lock(_removal_lock_path(root), shared=True):
                if read_file_system_time(root) > self.path.stat().st_mtime + self.ttl_s:
                    require_committed(root, self.step)
                os.utime(self.path)
        except FileNotFoundError:
            raise CommitError(
                f"the lease of {self.holder} on step {self.step} had ended ({self.path} is gone); "
                "acquire a new lease, of the newest step"
            ) from None

    def release(self) -> None:
        """Release the step; releasing it again is harmless."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process != read_process_identity(os.getpid()):
            return  # a child that was forked in the block
        try:
            self.release()
        except OSError as error:  # what was read is good, and on all ranks; the lease ends anyway
            logger.warning("cannot remove %s, which ends by itself: %s", self.path, error)


class _NoLease(Lease):
    """What a reader has of a step in a root that it cannot write: nothing keeps the step."""

    def renew(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def acquire_lease(root: str | Path, step: int, holder: str, *, ttl_s: float = LEASE_S) -> Lease:
    """Acquire a lease of a committed step; a context manager that releases it.

    The lease lasts ``ttl_s`` unless it is renewed; messages name its ``holder``. A root that cannot
    be written, such as a read-only mount or another user's, allows no lease; a warning says so.

    Raises:
        CommitError: the step is not committed, or corrupted.
        FormatError: another release has made the root or committed the step.
        ConfigError: ``ttl_s`` is not a duration in seconds.
    """
    return _acquire(root, step, holder, ttl_s, None)[0]


def _acquire(
    root: str | Path, step: int, holder: str, ttl_s: float, paths: Collection[str] | None
) -> tuple[Lease, Manifest]:
    """Return a lease of a step, and the step's manifest as it was checked under the same lock."""
    try:
        ttl_s = msgspec.convert(ttl_s, Seconds)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"step {step} of {root}: {ttl_s!r} is not a duration in seconds for the lease of "
            f"{holder}; pass a number, or pin the step to keep it without an end"
        ) from error
    path = Path(root) / PRIVATE_FOLDER / "leases" / f"{step}.{uuid.uuid4().hex}.json"
    lease = _LeaseRecord(
        step, holder, read_process_namespace(), read_process_identity(os.getpid()), ttl_s
    )
    try:
        with prevent_removal(root, step, paths=paths) as manifest:
            make_folder(path.parent)
            replace_file(path, encode_record(lease))
            return Lease(**vars(lease), path=path), manifest
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        warn_unwritable(Path(root).resolve())
        return _NoLease(**vars(lease), path=path), require_committed(root, step, paths=paths)


@functools.cache
def warn_unwritable(root: Path) -> None:
    """Log, once a process, that a root, a real path, can be read and not written."""
    logger.warning(
        "%s cannot be written by this process: its steps are read without a lease, so do not "
        "remove them meanwhile, and none can be saved",
        root,
    )


@contextmanager
def lease_to_read(
    root: str | Path, step: int, holder: str, *, paths: Collection[str] | None = None
) -> Iterator[Manifest]:
    """Lease a committed step within the block, for a day at most, and yield its manifest.

    The step is checked once, under the lock under which it is leased. If it cannot be leased, for
    example on a full disk or in a root that cannot be written, a warning says so. ``paths`` are as
    in `require_committed`.

    Raises:
        CommitError: the step is not committed, or corrupted.
    """
    with ExitStack() as leased:
        try:
            lease, manifest = _acquire(root, step, holder, LONG_LEASE_S, paths)
            leased.enter_context(lease)
        except OSError as error:
            logger.warning(
                "cannot lease step %d in %s (%s): do not remove it while it is read",
                step,
                root,
                error.strerror,
            )
            manifest = require_committed(root, step, paths=paths)
        yield manifest


def list_leases(root: str | Path, *, clock: Callable[[], float] | None = None) -> list[Lease]:
    """Return the valid leases; remove those that ended or whose process is gone.

    A lease whose file is torn keeps the step in its file name for `LONG_LEASE_S`. An ended lease is
    read again under the lock under which leases are renewed before it is removed; within
    `acquire_removal_lock` it stays for the next call. The time is that of the root's file system,
    unless ``clock`` returns it.
    """
    names = list_uncached(Path(root) / PRIVATE_FOLDER / "leases", "[0-9]*.json")
    paths = [path for path in names if _parse_step(path) is not None]  # others are not leases
    now = clock() if clock else read_file_system_time(root) if paths else 0.0
    found = {path: lease for path in paths if (lease := _read_valid_lease(path, now))}
    ended = [path for path in paths if path not in found and path.exists()]
    if ended:
        # in a read-only root, or while the lock is held, they are removed later
        with suppress(OSError), try_acquire_file_lock(_removal_lock_path(root)) as acquired:
            for path in ended if acquired else []:
                if lease := _read_valid_lease(path, now):
                    found[path] = lease
                else:
                    path.unlink(missing_ok=True)
    return [found[path] for path in sorted(found)]


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
    try:
        with path.open("rb") as file:  # mtime before content: another node may renew it
            renewed_at = os.fstat(file.fileno()).st_mtime
            content = file.read()
    except FileNotFoundError:
        return None  # released meanwhile
    lease = Lease(step, "unknown (its file is torn)", "", "", LONG_LEASE_S, path)
    with suppress(ValueError):
        written = Lease(**vars(decode_record(_LeaseRecord, content, path)), path=path)
        lease = written if written.step == step else lease
    gone = lease.host == read_process_namespace() and not is_process_alive(lease.process)
    return None if gone or now > renewed_at + lease.ttl_s else lease


def _parse_step(path: Path) -> int | None:
    return parse_number(path.name.partition(".")[0])
