"""The small files beside a slot, and the lock under which it is read and freed.

The ticket, a small JSON, seals the image in a slot. A ticket appears by an atomic rename after the
last byte of the image is in place, so an image with a ticket is complete. A digest of its text
distinguishes a torn or edited ticket from a valid one. Removing the ticket frees the slot.

The cache record names the committed file that the bytes of a free slot still are. A commit frees a
slot, and the image stays in it until the slot is filled again. The commit leaves a record beside
the slot, by which a restarted trainer finds the image; the next filling removes the record before
it writes the first byte. The record only says where to look: a reader holds the slot's lock and
compares the digest of the bytes with the one in the step's manifest.

The version tag names the version of the weights in a slot, for readers on this node. A slot with a
sealed image and a free slot may both have a tag. The stager removes it, under the slot's exclusive
lock, before it writes the first byte of the next image. So a reader that finds the tag under the
slot's shared lock has the version's bytes until it releases the lock.

Readers share a slot's lock: the task that persists the image, a restore, a weight reader. Only the
stager takes it exclusively. Persisting and freeing an image are exclusive among themselves by the
lock of its ticket, so a slow reader delays neither.

The module does not import torch, which saves the processes that persist images seconds of import.
"""

import fcntl
import math
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trinity_sync.errors import TicketError
from trinity_sync.fs.atomic import read_file, replace_file
from trinity_sync.fs.locks import LockFile, lock_file
from trinity_sync.fs.records import (
    Count,
    Record,
    Seconds,
    decode_record,
    encode_record,
    parse_run_and_step,
    read_record,
)
from trinity_sync.layout import COMPONENTS, FOLDERS, Component, is_below, is_path
from trinity_sync.snapshot.identity import Origin

TICKET_SUFFIX = ".ticket"
FAILED_SUFFIX = ".failed"
_SLOT = re.compile(
    r"(?P<role>[\w-]+)\.(?P<component>[\w-]+)\.rank(?P<rank>[0-9]{1,18})\.[0-9]+\.slot"
    + re.escape(TICKET_SUFFIX)
)


@dataclass(frozen=True, kw_only=True)
class Ticket(Origin, Record):
    """A sealed image: where it comes from, and which file of the step it is."""

    image: str
    """Random name, which distinguishes the image from all others in the slot."""
    component: str
    components: tuple[str, ...]
    """Components that this rank submits for this role in this save."""
    shared: dict[str, str] = field(default_factory=dict, hash=False)
    """Images of an earlier save of the step that are part of this save as well, by component."""
    path: str
    """File below the step's folder, or the folder into which a packed image is extracted."""
    form: Literal["file", "folder"]
    """The bytes of a file, or those of the files of a folder, as of `packed.pack`."""
    nbytes: Count
    sealed_at: Seconds
    """When the image was sealed, in seconds since the epoch."""
    monotonic_s: Seconds
    """The same by the node's monotonic clock, which all its processes share."""
    stall_s: Seconds
    """Seconds for which the save held the rank's training thread until the seal. An overlapped save
    holds it during the call, and while it waits for the copy."""

    @property
    def what(self) -> str:
        """Description of the image for messages."""
        return f"{self.component} of step {self.step}, role {self.role}, rank {self.rank}"

    def age_s(self, now: float) -> float:
        """Return the seconds since the seal at ``now``, a `time.monotonic` read after the ticket.

        Infinite if the node was rebooted since, which a spool on a disk survives.
        """
        return now - self.monotonic_s if now >= self.monotonic_s else math.inf


def list_components(tickets: Collection[Ticket]) -> tuple[Component, ...]:
    """Return the components of a save, as far as its tickets on one node name them.

    Only the tickets of rank 0 are sure to name the components of small files. If rank 0 is on
    another node, they are included in any case, and the tasks that look for them find some or none.
    So are all components if there are several roles, of which some may have submitted nothing yet.
    """
    named = {name for t in tickets for name in (*t.components, *t.replicated, *t.replicas)}
    if any(len(ticket.roles) > 1 for ticket in tickets):
        named |= {*COMPONENTS} - {"dcp"}
    if tickets and all(ticket.rank for ticket in tickets):
        named |= {*FOLDERS}
    return tuple(name for name in COMPONENTS if name in named)


def ticket_path(slot: Path) -> Path:
    """Return the path of the ticket of ``slot``, which may not exist."""
    return slot.with_name(slot.name + TICKET_SUFFIX)


def failure_path(slot: Path) -> Path:
    """Return the path of the file that says why the save of the image in ``slot`` failed."""
    return slot.with_name(slot.name + FAILED_SUFFIX)


def seal(slot: Path, ticket: Ticket) -> None:
    """Seal the image in a slot: it survives this process and may be persisted."""
    failure_path(slot).unlink(missing_ok=True)  # of the slot's previous image
    replace_file(ticket_path(slot), encode_record(ticket), sync=False, own_name=False)


def read_ticket(slot: Path) -> Ticket | None:
    """Return the ticket of ``slot``, or None if the slot is free.

    Raises:
        TicketError: the ticket is torn or edited, or no file.
    """
    path, content = ticket_path(slot), b""
    try:
        content = read_file(path)
        ticket = decode_record(Ticket, content, path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _invalid(path, f"is torn or edited ({error})", content) from error
    if not is_below(ticket.path) or not is_path(ticket.root):
        raise _invalid(path, "names a root or a file that no step can have", content)
    return ticket


def _invalid(path: Path, why: str, content: bytes) -> TicketError:
    slot = _SLOT.fullmatch(path.name)
    run, step = parse_run_and_step(content)
    return TicketError(
        f"ticket {path} {why}; its image cannot be trusted and is not saved. "
        "Remove the ticket to free the slot.",
        path=path,
        role=slot["role"] if slot else "",
        component=slot["component"] if slot else "",
        rank=int(slot["rank"]) if slot else -1,
        run=run,
        step=step,
    )


KEPT_SUFFIX = ".kept"
CLOSED_SUFFIX = ".closed"
"""Of the mark on a slot that its trainer has closed while it was in use."""


@dataclass(frozen=True)
class CachedFile(Record):
    """A committed file that a free slot still holds."""

    step: Count
    path: str
    """File below the step's folder."""
    file_digest: str
    """Digest of the file, as in the step's manifest."""


def read_cached_file(slot: Path) -> CachedFile | None:
    """Return the record of a slot; None if it is missing, torn or altered."""
    return read_record(CachedFile, slot.with_name(slot.name + KEPT_SUFFIX))


PUBLISHED_SUFFIX = ".published"


@dataclass(frozen=True)
class VersionTag(Record):
    """A version of the weights that a slot holds, of one rank."""

    image: str
    """Random name of the image, as in its ticket, if it has one."""
    run: Count
    step: Count
    role: str
    rank: Count
    world_size: Count
    nbytes: Count
    layout: str
    """Digest of all bytes but the tensors' data: images of one layout have the same tensors at the
    same offsets."""
    run_key: str = ""


def version_tag_path(slot: Path) -> Path:
    """Return the path of the tag of ``slot``, which may not exist."""
    return slot.with_name(slot.name + PUBLISHED_SUFFIX)


def write_version_tag(slot: Path, published: VersionTag) -> None:
    """Write the tag of a slot; call it while the bytes cannot change."""
    replace_file(version_tag_path(slot), encode_record(published), sync=False, own_name=False)


def read_version_tag(slot: Path) -> VersionTag | None:
    """Return the tag of a slot; None if it is missing, torn or altered."""
    return read_record(VersionTag, version_tag_path(slot))


FILL_S = 600.0
"""Seconds within which a trainer has filled a slot."""


@contextmanager
def hold_slot(path: Path, *, limit_s: float = FILL_S) -> Iterator[int]:
    """Yield a descriptor of a slot's file, whose bytes cannot change within the block.

    Raises:
        FileNotFoundError: there is no such slot.
        LockTimeoutError: the trainer that fills it hangs.
    """
    with lock_file(path, shared=True, limit_s=limit_s) as lock:
        yield lock.fd


def try_remove_slot(file: LockFile, path: Path) -> bool:
    """Remove the slot that is open as ``file``, unless it has an image or another process has it.

    Otherwise leave a mark on it, for who frees it; return whether it is removed.
    """
    # readers finish first, and a process that was started meanwhile keeps the file
    free = file.try_acquire(shared=True) and not ticket_path(path).exists()
    if free and file.try_acquire_range(fcntl.F_WRLCK) and is_named(file, path):
        remove_records(path)
        path.unlink(missing_ok=True)
        if file.try_acquire():  # no reader is in it, and those that map it would keep its memory
            os.truncate(file.fd, 0)
        return True
    with suppress(OSError):  # shared memory is full, or the folder is gone
        path.with_name(path.name + CLOSED_SUFFIX).touch()
    return False


def remove_records(slot: Path) -> None:
    """Remove the records of what the bytes of a slot are, under its exclusive lock."""
    for suffix in (CLOSED_SUFFIX, KEPT_SUFFIX, PUBLISHED_SUFFIX):
        slot.with_name(slot.name + suffix).unlink(missing_ok=True)


def is_named(file: LockFile, path: Path) -> bool:
    """Return whether a path leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file.fd), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def lock_slot(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a slot, read-only; waits and raises as `hold_slot`."""
    with lock_file(path, shared=True, limit_s=FILL_S) as lock:
        size = os.fstat(lock.fd).st_size
        # unmapped with the last view of it: a slice may outlive the block, the lock does not
        yield memoryview(lock.map(size) if size else b"")


@contextmanager
def hold_image(slot: Path, image: str, *, limit_s: float = math.inf) -> Iterator[Ticket]:
    """Hold a sealed image within the block, to persist or to free it; yield its ticket.

    By default it waits for another holder without a limit.

    Raises:
        FileNotFoundError: it was evicted or freed meanwhile.
        LockTimeoutError: another process holds it for ``limit_s``, or its trainer hangs.
        TicketError: as `read_ticket`.
    """
    of_ticket = lock_file(ticket_path(slot), shared=False, limit_s=limit_s)
    with of_ticket, hold_slot(slot, limit_s=min(limit_s, FILL_S)):
        ticket = read_ticket(slot)
        if ticket is None or ticket.image != image:
            raise FileNotFoundError  # of this image, as without a ticket
        yield ticket


def free_slot(path: Path, image: str, digest: str = "") -> None:
    """Free the slot at ``path`` if it still holds ``image``, as named in its ticket.

    The ``digest`` of the committed file is recorded beside the slot, so that the file can be read
    from the slot until another image fills it.
    """
    # a file that is missing was freed before, or removed with the trainer
    with suppress(FileNotFoundError), hold_image(path, image) as ticket:
        if digest and ticket.form == "file":
            kept = encode_record(CachedFile(ticket.step, ticket.path, digest))
            with suppress(OSError):  # without the record, the file is read from disk
                beside = path.with_name(path.name + KEPT_SUFFIX)
                replace_file(beside, kept, sync=False, own_name=False)
        ticket_path(path).unlink(missing_ok=True)
        failure_path(path).unlink(missing_ok=True)
