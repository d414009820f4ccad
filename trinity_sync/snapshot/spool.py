"""The spool: a node's folder of slots and tickets, with one folder for each job.

::

    /dev/shm/trinity_sync-1000/                 mode 0700, of one user
      exp1-ckpts-1a2b3c4d/                      one job
        actor.model.rank0.0.slot                memory, reused
        actor.model.rank0.0.slot.ticket         sealed: a save that is not committed yet
        actor.model.rank0.1.slot                free: has no ticket
        actor.model.rank0.1.slot.kept           committed file that it still holds: ``ticket``
        actor.model.rank0.1.slot.published      version of the weights: ``ticket``
        actor.model.rank0.1.slot.closed         its trainer has left it to who frees it: ``ticket``
        receipts/...                            statuses of save functions: `save_functions`
        job.json                                the job's root, and the format of the folder
        0f3c9a11d2b7e648.run                    a run has a trainer here; its last commit
        saver, server, unrequested              who commits: ``saver_control``
        away                                    why what commits does not see the root

The client and the stack of a job may be of different releases. So ``job.json`` names the format of
everything in the folder, and is read before anything else there: a folder of another release is
refused as a whole.
"""

import fcntl
import hashlib
import logging
import math
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from trinity_sync.errors import FormatError, SpoolError, SpoolFullError, TicketError, warn_once
from trinity_sync.fs.atomic import FileSignature, list_paths, read_signature, replace_file
from trinity_sync.fs.file_system import find_room, measure_ray_stores
from trinity_sync.fs.locks import LockFile, has_no_other_users, open_lock_file
from trinity_sync.fs.records import Record, encode_record, read_record
from trinity_sync.layout import SPOOL_FORMAT, check_name, job_id_of, parse_number
from trinity_sync.snapshot.identity import SaveId, explain_away, job_id, read_identity
from trinity_sync.snapshot.ticket import (
    CLOSED_SUFFIX,
    KEPT_SUFFIX,
    PUBLISHED_SUFFIX,
    TICKET_SUFFIX,
    Ticket,
    VersionTag,
    failure_path,
    hold_image,
    read_cached_file,
    read_ticket,
    read_version_tag,
    try_remove_slot,
)

logger = logging.getLogger(__name__)

SLOT_SUFFIX = ".slot"
JOB_FILE = "job.json"


@dataclass(frozen=True)
class _Owner(Record, format=SPOOL_FORMAT):
    root: str


@dataclass(frozen=True)
class SealedImage:
    """A slot and the ticket that was found beside it."""

    slot: Path
    ticket: Ticket

    @property
    def failed(self) -> bool:
        """Whether the save of this image is known to have failed."""
        return failure_path(self.slot).exists()


@dataclass(frozen=True)
class JobSpool:
    """One job's folder in the spool of this node."""

    folder: Path
    of: Path | None = field(default=None, compare=False)
    """The job's root; set where `make` may create the folder."""
    _made: list[FileSignature] = field(default_factory=list, compare=False, repr=False)
    """The job's file that `make` has found last."""

    def make(self) -> bool:
        """Create the folder if it is missing; return False if it is the one of the last call.

        A process that ended may have removed it, or a program that does not know it: systemd's
        RemoveIPC, a cleaner of temporary files.

        Raises:
            SpoolError: as `make_own_folder`.
            FormatError: as `read_root`.
        """
        path = self.folder / JOB_FILE
        if self._made and read_signature(path) in self._made:
            return False
        try:
            make_own_folder(self.folder.parent)
            make_own_folder(self.folder)
            if self.read_root() is None and self.of:
                owner = encode_record(_Owner(str(self.of)))
                replace_file(path, owner, sync=False)
        except FileNotFoundError:  # another process has just removed it as unused
            return self.make()
        found = read_signature(path)
        self._made[:] = [found] if found else []
        return True

    def mark_run(self, run_key: str) -> None:
        """Leave a mark of a run that saves here, by which the stack sees that it sees this folder.

        Raises:
            SpoolError, FormatError: as `make`.
        """
        self.make()
        with suppress(OSError):  # shared memory is full: nothing can be saved either
            self._mark(run_key).touch()

    def has_run(self, run_key: str) -> bool:
        """Return whether a run has left its mark here."""
        return self._mark(run_key).exists()

    def note_commit(self, save: SaveId) -> None:
        """Note in the mark of a run, if there is one, that it has committed a step."""
        with suppress(OSError):
            if self.has_run(save.run_key):
                replace_file(self._mark(save.run_key), str(save.step), sync=False)

    def read_commit(self, run_key: str) -> int | None:
        """Return the step that a run has committed last, as far as this node has noted it."""
        with suppress(OSError):
            return parse_number(self._mark(run_key).read_text())
        return None

    def _mark(self, run_key: str) -> Path:
        return self.folder / f"{hashlib.sha256(run_key.encode()).hexdigest()[:16]}.run"

    def slot(self, role: str, component: str, rank: int, number: int) -> Path:
        """Return the path of a slot; ``number`` counts from 0."""
        check_name("role", role)
        check_name("component", component)
        return self.folder / f"{role}.{component}.rank{rank}.{number}{SLOT_SUFFIX}"

    def read_root(self) -> Path | None:
        """Return the job's root, which may be gone; None if the folder does not name it.

        Raises:
            FormatError: the folder is of another release.
        """
        try:
            owner = read_record(_Owner, self.folder / JOB_FILE)
        except FormatError as error:
            raise FormatError(
                f"{error} If no process of that release is left to save its images, remove "
                f"{self.folder}: they are lost."
            ) from None
        return Path(owner.root) if owner else None

    @property
    def away(self) -> Path:
        """File in which `tell_away` says why what commits does not see the job's root."""
        return self.folder / "away"

    def tell_away(self) -> str:
        """Return why this process does not see the job's root, and tell the job's processes."""
        why = explain_away(self.read_root(), self.folder.name)
        with suppress(OSError):  # shared memory is full
            if not why:
                self.away.unlink(missing_ok=True)
            elif not self.away.exists():
                logger.warning("%s Until then, or a later start, %s waits.", why, self.folder)
                replace_file(self.away, why, sync=False)
        return why

    @property
    def bytes_used(self) -> int:
        """Bytes of memory in use by the folder's files."""
        used = 0
        for folder, _, names in os.walk(self.folder):  # ignores folders that are removed meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    used += Path(folder, name).lstat().st_blocks * 512
        return used

    @property
    def receipts(self) -> Path:
        """Folder of the statuses of save functions."""
        return self.folder / "receipts"

    def tickets(self) -> tuple[list[SealedImage], list[TicketError]]:
        """Return the job's sealed images on this node, and the errors of unreadable tickets.

        Raises:
            FormatError: as `read_root`.
        """
        self.read_root()  # which refuses a folder of another release
        good: list[SealedImage] = []
        bad: list[TicketError] = []
        for path in list_paths(self.folder, f"*{SLOT_SUFFIX}{TICKET_SUFFIX}"):
            slot = path.with_name(path.name.removesuffix(TICKET_SUFFIX))
            try:
                ticket = read_ticket(slot)
            except TicketError as error:
                bad.append(error)
                continue
            if ticket:
                good.append(SealedImage(slot, ticket))
        return good, bad

    def read_save(self, save: SaveId) -> list[SealedImage]:
        """Return the sealed images of this attempt of a save; raises as `tickets`."""
        return [each for each in self.tickets()[0] if save.owns(each.ticket)]

    def read_step(self, save: SaveId) -> list[SealedImage]:
        """Return the sealed images of all saves of a save's step, by its run; raises as `tickets`.

        They are of both kinds, of all roles and all attempts.
        """
        return [each for each in self.tickets()[0] if save.is_of_step(each.ticket)]

    def find_cached_slots(self, role: str, component: str, digest: str) -> Iterator[Path]:
        """Yield free slots whose records say that they still hold the file of this digest."""
        names = f"{role}.{component}.rank*{SLOT_SUFFIX}{KEPT_SUFFIX}"
        for record in list_paths(self.folder, names):
            slot = record.with_name(record.name.removesuffix(KEPT_SUFFIX))
            kept = read_cached_file(slot)
            if kept and kept.file_digest == digest:
                yield slot

    def list_versions(self, role: str) -> Iterator[tuple[Path, VersionTag]]:
        """Yield all slots that hold a version of a role's weights, with their tags.

        Raises:
            FormatError: as `read_root`.
        """
        self.read_root()  # which refuses a folder of another release
        for path in list_paths(self.folder, f"{role}.*{SLOT_SUFFIX}{PUBLISHED_SUFFIX}"):
            slot = path.with_name(path.name.removesuffix(PUBLISHED_SUFFIX))
            tag = read_version_tag(slot)
            if tag and tag.role == role:
                yield slot, tag

    def remove_if_unused(self) -> None:
        """Remove the job's folder if no process uses its slots any longer.

        The ranks of a job end together, so the folder may disappear during the call. Another
        trainer may begin during the call: its slots and statuses stay.
        """
        with suppress(OSError):  # it is gone, or stays for the next start
            if list_paths(self.folder, f"*{SLOT_SUFFIX}*") or list_paths(self.receipts, "*"):
                return
            for path in self.folder.iterdir():
                if path == self.receipts:
                    with suppress(OSError):  # a status has just been written
                        path.rmdir()
                elif SLOT_SUFFIX not in path.name:
                    path.unlink(missing_ok=True)
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # it is not empty
                self.make()  # another trainer uses it, so it needs the root's name again

    def remove_closed(self) -> None:
        """Remove the slots that their trainer has closed while their images were in use.

        The folder stays: another trainer may be about to save there.
        """
        for mark in list_paths(self.folder, f"*{SLOT_SUFFIX}{CLOSED_SUFFIX}"):
            slot = mark.with_name(mark.name.removesuffix(CLOSED_SUFFIX))
            with suppress(FileNotFoundError), closing(LockFile(slot, os.O_RDWR)) as file:
                try_remove_slot(file, slot)

    def require_room(self, nbytes: int, *, slots: int = 1, raises: bool = True) -> None:
        """Check that images of ``nbytes`` bytes in total will fit, and log how many can be had.

        Slots of an earlier run count as free, because they are reused. That not all ``slots`` fit,
        or that Ray's object store may need the memory, is a warning, and without ``raises`` all is.

        Raises:
            SpoolFullError: they do not fit; the message says how many bytes are needed.
            SpoolError: as `make`.
        """
        self.make()
        mine = 0
        for slot in list_paths(self.folder, f"*{SLOT_SUFFIX}"):
            with suppress(FileNotFoundError):  # its process has just removed it
                mine += slot.stat().st_blocks * 512
        room, store = find_room(self.folder), measure_ray_stores(self.folder)
        needed, had = slots * nbytes, room.nbytes + mine
        found = (
            f"the images of this job need {needed:,} bytes in spool {self.folder}, where {had:,} "
            "can be had"
        )
        found += f", of which Ray's object store may take {store:,}" if store else ""
        todo = (
            f". {room.enlarge}, or set TRINITY_SYNC_SPOOL to another folder in memory, or "
            "TRINITY_SYNC_SLOTS=1."
        )
        if nbytes > had and raises:
            raise SpoolFullError(found + todo)
        if needed > had >= nbytes:
            found += ": a save waits for the commit of the one before"
        lacks = needed > had - store
        logger.log(logging.WARNING if lacks else logging.INFO, found + todo * lacks)


def open_job_spool(spool: Path, root: str | Path) -> JobSpool:
    """Return a job's folder in a spool, created if it is missing.

    Raises:
        SpoolError: the spool is not a folder of this user alone, or cannot be made.
        FormatError: the root or the job's folder is of another release.
    """
    job = JobSpool(spool / job_id(root), Path(root).resolve())
    job.make()
    return job


def remove_replaced_spools(job: JobSpool, *, nbytes: int | None = None) -> None:
    """Remove the folders of earlier jobs of a job's root, which was removed or moved since.

    What waits in them stays, since their root may be unmounted; it is removed by a call that lacks
    memory for ``nbytes``, which asks no root. A folder whose slots a process still uses stays: that
    training may be in a container, which has another root of this path.
    """
    if nbytes is not None and nbytes <= find_room(job.folder).nbytes:
        return
    root = job.read_root()
    identity = read_identity(root) if root and nbytes is None else ""
    for other in list_job_spools(job.folder.parent):
        of, name = other.read_root(), other.folder.name
        if (
            name == job.folder.name
            or of is None
            or (of != root and name != job_id_of(of, identity))
        ):
            continue
        if not all(map(has_no_other_users, list_paths(other.folder, f"*{SLOT_SUFFIX}"))):
            continue
        pending = sorted({each.ticket.step for each in other.tickets()[0] if not each.failed})
        if of == root and (nbytes or not (pending or list_paths(other.receipts, "*"))):
            shutil.rmtree(other.folder, ignore_errors=True)
            if pending:
                logger.warning(
                    "steps %s of %s are lost: they were not committed before the root was removed, "
                    "moved or unmounted, and another job, which began there, needs their memory.",
                    *(pending, root),
                )
        elif pending and nbytes is None and (of == root or explain_away(of, name)):
            logger.warning(
                "steps %s wait for job %s at %s, and are not committed in %s. To commit them, end "
                "this training, and mount that root or move it back; to free their memory, remove "
                "%s.",
                *(pending, name, of, root, other.folder),
            )


def list_job_spools(spool: Path) -> list[JobSpool]:
    """Return the folders of all jobs on this node; name those of another release in a warning."""
    found, refused = sort_job_spools(spool)
    for error in refused:
        warn_once(str(error))
    return found


def sort_job_spools(spool: Path) -> tuple[list[JobSpool], list[FormatError]]:
    """Return the folders of all jobs on this node, and the errors of those of another release."""
    found: list[JobSpool] = []
    refused: list[FormatError] = []
    if spool.is_dir():
        make_own_folder(spool)
        for job in (JobSpool(entry) for entry in sorted(spool.iterdir()) if entry.is_dir()):
            try:
                job.read_root()
                found.append(job)
            except FormatError as error:
                refused.append(error)
    return found, refused


def get_job_spool(folder: str | Path, save: SaveId) -> JobSpool:
    """Return the folder of a save's job, named by a flow parameter that is not trusted.

    Raises:
        SpoolError: the folder is another job's, or not of this user alone, so others may have put
            images there.
        FormatError: as `JobSpool.read_root`.
    """
    spool = JobSpool(Path(folder))
    if spool.folder.exists():
        for each in (spool.folder.parent, spool.folder):
            require_own_folder(each)
        root = spool.read_root()
        if spool.folder.name != save.job:
            raise SpoolError(
                f"spool folder {folder} is that of a job at {root}, not of job {save.job} at "
                f"{save.root}; start the save from its trainer"
            )
    return spool


def make_own_folder(folder: Path) -> None:
    """Create ``folder`` if it is missing.

    Raises:
        SpoolError: it is not a folder of this user alone, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and not os.path.lexists(folder):
            return make_own_folder(folder)  # it was removed meanwhile
        raise SpoolError(
            f"cannot make the spool folder {folder}: {error.strerror}. Set TRINITY_SYNC_SPOOL to "
            "a folder in memory that this user may write."
        ) from error
    require_own_folder(folder)


def require_own_folder(folder: Path) -> None:
    """Check that a folder belongs to this user alone.

    Raises:
        SpoolError: it is not.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SpoolError(
            f"spool folder {folder} belongs to another user or is not a folder; "
            "set TRINITY_SYNC_SPOOL to one of your own."
        )
    if found.st_mode & 0o077:
        raise SpoolError(
            f"spool folder {folder} is open to other users, who could replace images in it; "
            f"run: chmod 700 {folder}"
        )


WORKER = UUID(int=0)
"""In the place of a flow run: a worker, which holds this lock as long as it lives."""


BEAT_S = 15.0
"""Seconds within which a worker that works has touched the file of that lock: it does in five."""


def check_worker(spool: Path) -> bool | None:
    """Return whether the worker of this node begins runs; None if none lives.

    One that hangs, or whose server does not answer, begins none.
    """
    with suppress(OSError), closing(LockFile(spool / ".runs.lock", os.O_RDONLY)) as lock:
        if not lock.try_acquire_range(fcntl.F_RDLCK, WORKER.int, 1):
            return abs(time.time() - os.fstat(lock.fd).st_mtime) < BEAT_S
    return None


@contextmanager
def try_run_lock(spool: Path, run_id: UUID) -> Iterator[bool]:
    """Acquire the lock of a flow run on this node without waiting; yield whether it was free.

    The worker that executes a run holds its lock from before it takes the run until the run's end
    is reported, so a lock that is free means that no process of this node executes the run, and
    that none begins to within the block.

    Raises:
        SpoolError: the spool is not a folder of this user alone, or cannot be made.
    """
    make_own_folder(spool)
    with open_lock_file(spool / ".runs.lock") as lock:
        # one byte of one file for each run: unlike a file for each, a process that is killed
        # leaves nothing behind
        yield lock.try_acquire_range(fcntl.F_WRLCK, run_id.int % 2**62, 1)


def mark_image_failed(sealed: SealedImage, reason: str, *, limit_s: float = math.inf) -> None:
    """Record why an image is not saved, unless its slot holds another image by now.

    Raises:
        LockTimeoutError: the trainer that fills the slot hangs, or what persists it does.
    """
    held = hold_image(sealed.slot, sealed.ticket.image, limit_s=limit_s)
    with suppress(FileNotFoundError), held:
        try:
            replace_file(failure_path(sealed.slot), reason, sync=False, own_name=False)
        except OSError:  # shared memory is full: an empty file takes none
            failure_path(sealed.slot).touch()
