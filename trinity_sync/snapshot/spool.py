"""A node's folder of slots and tickets, one folder a job in it.

::

    /dev/shm/trinity_sync-1000/                 mode 0700, of one user
      ckpts-1a2b3c4d/                           one job
        actor.model.rank0.0.slot                memory, reused
        actor.model.rank0.0.slot.ticket         sealed: waits to be committed
        actor.model.rank0.1.slot                free: has no ticket
        actor.model.rank0.1.slot.kept           of which commit its bytes still are, see ``kept``
        actor.model.rank0.1.slot.published      which version of the weights its bytes are
        receipts/...                            of saves by a function, see ``receipt``
        root                                    path of the job's root
"""

import contextlib
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trinity_sync.errors import FormatError, SpoolError, SpoolFullError, TicketError
from trinity_sync.layout import check_name, job_id
from trinity_sync.snapshot.slot_cache import KEPT_SUFFIX, kept_in
from trinity_sync.snapshot.ticket import (
    TICKET_SUFFIX,
    Ticket,
    failure_path,
    read_ticket,
)
from trinity_sync.snapshot.version_tag import PUBLISHED_SUFFIX, Published, published_in

logger = logging.getLogger(__name__)

SLOT_SUFFIX = ".slot"
ROOT_NOTE = "root"


@dataclass(frozen=True)
class Sealed:
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
    """The job's root, for whoever may `make` the folder."""

    def make(self) -> None:
        """Make the folder if it is missing.

        A process that ended may have removed it, or something that knows nothing of it: systemd's
        RemoveIPC, a cleaner of temporary files.

        Raises:
            SpoolError: as `own_folder`.
        """
        own_folder(self.folder.parent)
        own_folder(self.folder)
        note = self.folder / ROOT_NOTE
        if self.of and not note.exists():
            temporary = note.with_name(f".{ROOT_NOTE}.{uuid.uuid4().hex}")
            temporary.write_bytes(os.fsencode(self.of))
            temporary.replace(note)

    def slot(self, role: str, component: str, rank: int, number: int) -> Path:
        """Path of one of the slots of a rank's component."""
        check_name("role", role)
        check_name("component", component)
        return self.folder / f"{role}.{component}.rank{rank}.{number}{SLOT_SUFFIX}"

    @property
    def root(self) -> Path | None:
        """The job's root, which need not exist any more; None if nobody wrote it down."""
        try:
            return Path(os.fsdecode((self.folder / ROOT_NOTE).read_bytes()))
        except FileNotFoundError:
            return None

    @property
    def bytes_used(self) -> int:
        """Bytes of memory that its files have."""
        used = 0
        for folder, _, names in os.walk(self.folder):  # passes over what goes meanwhile
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    used += Path(folder, name).lstat().st_blocks * 512
        return used

    @property
    def receipts(self) -> Path:
        """Folder of the receipts of saves by a function."""
        return self.folder / "receipts"

    def tickets(self) -> tuple[list[Sealed], list[TicketError | FormatError]]:
        """All sealed images of the job on this node, and why other tickets cannot be read."""
        good: list[Sealed] = []
        bad: list[TicketError | FormatError] = []
        for path in sorted(self.folder.glob(f"*{SLOT_SUFFIX}{TICKET_SUFFIX}")):
            slot = path.with_name(path.name.removesuffix(TICKET_SUFFIX))
            try:
                ticket = read_ticket(slot)
            except (TicketError, FormatError) as error:
                bad.append(error)
                continue
            if ticket:
                good.append(Sealed(slot, ticket))
        return good, bad

    def of_step(self, run: int, step: int) -> tuple[list[Sealed], list[TicketError | FormatError]]:
        """As `tickets`, of one step of one run."""
        good, bad = self.tickets()
        return [s for s in good if (s.ticket.run, s.ticket.step) == (run, step)], bad

    def kept(self, digest: str) -> Iterator[Path]:
        """Free slots whose notes say that they still hold the file of this digest."""
        for note in sorted(self.folder.glob(f"*{SLOT_SUFFIX}{KEPT_SUFFIX}")):
            slot = note.with_name(note.name.removesuffix(KEPT_SUFFIX))
            try:
                kept = kept_in(slot)
            except FormatError as error:
                logger.warning("%s", error)
                continue
            if kept and kept.file_digest == digest:
                yield slot

    def published(self, role: str, run: int, step: int) -> dict[Path, Published]:
        """Slots that hold the weights of a version, with what is said of them, by rank.

        Raises:
            FormatError: another release has written what is said of one of them.
        """
        found = {}
        for slot in self._published_slots(role):
            try:
                said = published_in(slot)
            except FormatError as error:
                if (error.run, error.step) == (run, step):
                    raise
                continue
            if said and (said.role, said.run, said.step) == (role, run, step):
                found[slot] = said
        return dict(sorted(found.items(), key=lambda item: item[1].rank))

    def all_published(self, role: str) -> Iterator[tuple[Path, Published]]:
        """Slots that hold weights of a role, of whichever version, with what is said of them.

        What another release has written is passed over.
        """
        for slot in self._published_slots(role):
            with contextlib.suppress(FormatError):
                said = published_in(slot)
                if said and said.role == role:
                    yield slot, said

    def _published_slots(self, role: str) -> Iterator[Path]:
        for note in self.folder.glob(f"{role}.*{SLOT_SUFFIX}{PUBLISHED_SUFFIX}"):
            yield note.with_name(note.name.removesuffix(PUBLISHED_SUFFIX))

    def remove_if_unused(self) -> None:
        """Remove the job's folder once the last process has given its slots back.

        The ranks of a job end together: one of them may find the folder gone under its hands. And
        another trainer may begin meanwhile: its slots and receipts stay.
        """
        with contextlib.suppress(FileNotFoundError):
            if any(self.folder.glob(f"*{SLOT_SUFFIX}*")) or any(self.receipts.glob("*")):
                return
            for path in self.folder.iterdir():
                if path == self.receipts:
                    with contextlib.suppress(OSError):  # there is one now
                        path.rmdir()
                elif path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif SLOT_SUFFIX not in path.name:
                    path.unlink(missing_ok=True)
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # it is not empty
                self.make()  # another trainer uses it, so it names its job again

    def check_room(self, nbytes: int) -> None:
        """See at the start that images of ``nbytes`` bytes in all will fit.

        Slots that an earlier run left behind count as room, since they are used again.

        Raises:
            SpoolFullError: they will not fit; the message says how many bytes are needed.
            SpoolError: as `make`.
        """
        self.make()
        room = os.statvfs(self.folder)
        free = room.f_bavail * room.f_frsize
        mine = sum(p.stat().st_blocks * 512 for p in self.folder.glob(f"*{SLOT_SUFFIX}"))
        if nbytes > free + mine:
            raise SpoolFullError(
                f"the images of this job need {nbytes:,} bytes in spool {self.folder}, where "
                f"{free + mine:,} can be had. Enlarge it (mount -o remount,size=... /dev/shm, or "
                "--shm-size of the container), or set TRINITY_SYNC_SPOOL to another folder in "
                "memory, or TRINITY_SYNC_SLOTS=1."
            )


def open_job_spool(spool: Path, root: str | Path) -> JobSpool:
    """The folder of the job at ``root`` in ``spool``, made if it is missing.

    Raises:
        SpoolError: the spool is not a folder of this user alone, or cannot be made.
    """
    job = JobSpool(spool / job_id(root), Path(root).resolve())
    job.make()
    return job


def job_spools(spool: Path) -> Iterator[JobSpool]:
    """The folders of all jobs that have one on this node."""
    if spool.is_dir():
        own_folder(spool)
        yield from (JobSpool(entry) for entry in sorted(spool.iterdir()) if entry.is_dir())


def known_job_spool(folder: str | Path, root: str | Path) -> JobSpool:
    """The folder of the job at ``root``, as somebody else names it, who need not be trusted.

    Raises:
        SpoolError: it is not the job's, or not of this user alone, so that anybody may have put
            images there.
    """
    spool = JobSpool(Path(folder))
    if spool.folder.exists():
        for each in (spool.folder.parent, spool.folder):
            require_own(each)
        if spool.root != Path(root):
            raise SpoolError(
                f"spool folder {folder} is that of the job at {spool.root}, not of {root}; start "
                "the save from its trainer"
            )
    return spool


def own_folder(folder: Path) -> None:
    """Make ``folder`` if it is missing.

    Raises:
        SpoolError: it is not a folder of this user alone, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpoolError(
            f"cannot make the spool folder {folder}: {error.strerror}. Set TRINITY_SYNC_SPOOL to "
            "a folder in memory that this user may write."
        ) from error
    require_own(folder)


def require_own(folder: Path) -> None:
    """See that a folder is of this user alone.

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
