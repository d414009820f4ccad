"""Leases of readers, and the lock of removal.

::

    root/.trinity_sync/
      removal.lock                      shared to acquire a lease or pin, exclusive to remove steps
      leases/40.{random}.json           a reader's lease of step 40 for so many seconds

A lease is a file, so it needs no server, and holds for every node that sees the root. It is
acquired under the shared lock and only of a step that is committed; steps are removed under the
exclusive lock and only when they are not in use (`pins.steps_in_use`). So a reader has its step or
an error, never a folder that vanishes while it is read. A reader that died without releasing its
lease blocks a step until the lease ends; not at all where its process is known to be gone. A lease
of another release holds its step, and is not removed here.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trinity_sync.errors import CommitError, ConfigError, FormatError
from trinity_sync.fs.atomic import list_uncached, make_folder, replace_file
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.locks import LockFile, file_lock, file_lock_if_free
from trinity_sync.fs.process import process_home, process_lives, process_name
from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, parse_number
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

LEASE_S = 600.0
"""Seconds that a lease lasts unless it is renewed."""
LONG_LEASE_S = 86_400.0
"""The same for readers of whole steps; a lease ends earlier with its process."""

_ENDLESS_S = 1e11
"""Seconds in 3,000 years: of a lease of another release."""

ACQUIRE_S = 30.0
"""Seconds within which a lease or pin is acquired, also on a slow file server."""


@dataclass(frozen=True)
class _LeaseRecord(Record, format=ROOT_FORMAT):
    """The content of a lease's file."""

    step: Count
    holder: str
    """Name of the reader, for people."""
    host: str
    """As `process_home` names it."""
    process: str
    """``pid/start time`` there."""
    ttl_s: Seconds


@dataclass(frozen=True)
class Lease(_LeaseRecord):
    """A reader's hold on a step; a context manager that releases it."""

    path: Path
    """The file; its time of change is when the lease was acquired or renewed."""

    def renew(self) -> None:
        """Start the lease's time again; also of one that has ended, while its step is there.

        Raises:
            CommitError: it had ended, and it was removed, or its step was.
        """
        root = self.path.parents[2]
        try:
            with file_lock(_lock_of(root), shared=True):  # no lease is judged meanwhile
                if file_time(root) > self.path.stat().st_mtime + self.ttl_s:
                    require_committed(root, self.step)
                os.utime(self.path)
        except FileNotFoundError:
            raise CommitError(
                f"the lease of {self.holder} on step {self.step} had ended ({self.path} is gone); "
                "acquire a new one, of the newest step"
            ) from None

    def release(self) -> None:
        """Release the step; again is harmless."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process == process_name(os.getpid()):  # not in a child that was forked in the block
            self.release()


def acquire_lease(root: str | Path, step: int, holder: str, *, ttl_s: float = LEASE_S) -> Lease:
    """Acquire a lease of a committed step; a context manager that releases it.

    Args:
        root: the job's root.
        step: a committed one.
        holder: name of the reader, for people.
        ttl_s: seconds that the lease lasts unless it is renewed.

    Raises:
        CommitError: the step is not committed, or corrupted.
        ConfigError: ``ttl_s`` is no number of seconds.
    """
    try:
        ttl_s = msgspec.convert(ttl_s, Seconds)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"step {step} of {root}: a lease of {ttl_s!r} s for {holder} is no number of "
            "seconds; pass one, or pin the step to keep it without end"
        ) from error
    with hold_committed(root, step):
        path = _folder(root) / f"{step}.{uuid.uuid4().hex}.json"
        lease = _LeaseRecord(step, holder, process_home(), process_name(os.getpid()), ttl_s)
        replace_file(path, encode_record(lease))
        return Lease(**vars(lease), path=path)


@contextmanager
def lease_to_read(root: str | Path, step: int, holder: str) -> Iterator[Manifest]:
    """Yield the manifest of a committed step that is leased in the block, for a day at most.

    In a root that may only be read, such as another job's, no lease is possible; that is logged.

    Args:
        root: the job's root.
        step: a committed one.
        holder: name of the reader, for people.

    Raises:
        CommitError: the step is not committed, or corrupted.
    """
    with ExitStack() as lease:
        try:
            lease.enter_context(acquire_lease(root, step, holder, ttl_s=LONG_LEASE_S))
        except OSError as error:
            logger.warning(
                "step %d in %s cannot be leased (%s): do not remove it while it is read",
                step,
                root,
                error.strerror,
            )
        yield require_committed(root, step)


def list_leases(root: str | Path, *, clock: Callable[[], float] | None = None) -> list[Lease]:
    """Return the leases that hold; those that ended, or whose process is gone, are removed.

    A lease whose file is torn holds the step of its file's name, for `LONG_LEASE_S`; one of another
    release holds it until that release removes it. What has ended is read again under the lock
    under which leases are renewed, before it is removed; within `removal_lock` it stays, for the
    next call.

    Args:
        root: the job's root.
        clock: seconds since the epoch; that of the root's file system unless it is given.
    """
    names = list_uncached(Path(root) / PRIVATE_FOLDER / "leases", "[0-9]*.json")
    paths = [path for path in names if _step_of_lease(path) is not None]  # the others are not ours
    now = clock() if clock else file_time(root) if paths else 0.0
    found = {path: lease for path in paths if (lease := _holding(path, now))}
    ended = [path for path in paths if path not in found and path.exists()]
    if ended:
        # in a read-only root, or while the lock is held, they are removed later
        with suppress(OSError), file_lock_if_free(_lock_of(root)) as alone:
            for path in ended if alone else []:
                if lease := _holding(path, now):
                    found[path] = lease
                else:
                    path.unlink(missing_ok=True)
    return [found[path] for path in sorted(found)]


@contextmanager
def removal_lock(root: str | Path) -> Iterator[LockFile]:
    """Let no lease or pin be acquired within the block, in which steps are removed.

    Look at `list_leases` and `list_pins` inside, and take a step's name away before the block ends.

    Raises:
        LockTimeoutError: other processes hold the lock for longer than a lease or pin takes; no
            commit is to wait for them meanwhile.
    """
    with file_lock(_lock_of(root), limit_s=ACQUIRE_S) as lock:
        yield lock


@contextmanager
def hold_committed(root: str | Path, step: int, *, shared: bool = True) -> Iterator[None]:
    """Keep a step from removal within the block; it is committed when the block begins.

    Args:
        root: the job's root.
        step: a committed one.
        shared: let other leases and pins be acquired meanwhile.

    Raises:
        CommitError: the step is not committed, or corrupted.
    """
    if not _lock_of(root).exists():  # nor is a root made that is not mounted here
        require_committed(root, step)
    with file_lock(_lock_of(root), shared=shared):
        require_committed(root, step)
        yield


def _lock_of(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "removal.lock"


def _holding(path: Path, now: float) -> Lease | None:
    """Return the lease of a file, if it is one and holds."""
    if (step := _step_of_lease(path)) is None:
        return None
    try:
        with path.open("rb") as file:  # first: another node may have renewed it just now
            renewed_at = os.fstat(file.fileno()).st_mtime
            content = file.read()
    except FileNotFoundError:
        return None  # released meanwhile
    lease = Lease(step, "unknown (its file is torn)", "", "", LONG_LEASE_S, path)
    with suppress(ValueError):
        try:
            written = Lease(**vars(decode_record(_LeaseRecord, content, path)), path=path)
        except FormatError as error:
            return Lease(step, f"a reader of another release: {error}", "", "", _ENDLESS_S, path)
        lease = written if written.step == step else lease
    gone = lease.host == process_home() and not process_lives(lease.process)
    return None if gone or now > renewed_at + lease.ttl_s else lease


def _step_of_lease(path: Path) -> int | None:
    return parse_number(path.name.partition(".")[0])


def _folder(root: str | Path) -> Path:
    folder = Path(root) / PRIVATE_FOLDER / "leases"
    make_folder(folder)
    return folder
