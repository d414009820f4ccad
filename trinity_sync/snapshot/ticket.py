"""The small JSON beside a slot that seals the image in it.

A ticket appears by an atomic rename after the last byte of the image is in place, so an image with
a ticket is complete. A digest of its text distinguishes a torn or edited ticket from a valid one,
and from one that another release of trinity-sync has sealed. Removing the ticket frees the slot.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trinity_sync.errors import TicketError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import (
    TRAINER,
    Count,
    Record,
    Seconds,
    decode_record,
    encode_record,
    parse_run_and_step,
)
from trinity_sync.layout import (
    COMPONENTS,
    FOLDERS,
    SPOOL_FORMAT,
    Component,
    is_below,
    is_path,
)
from trinity_sync.snapshot.save_id import Origin

TICKET_SUFFIX = ".ticket"
FAILED_SUFFIX = ".failed"
_SLOT = re.compile(
    r"(?P<role>[\w-]+)\.(?P<component>[\w-]+)\.rank(?P<rank>[0-9]{1,18})\.[0-9]+\.slot"
    + re.escape(TICKET_SUFFIX)
)


@dataclass(frozen=True, kw_only=True)
class Ticket(Origin, Record, format=SPOOL_FORMAT, writer=TRAINER):
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
    """The bytes of a file, or a tar of small files."""
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
    named = {name for ticket in tickets for name in ticket.components}
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
        TicketError: the ticket is torn or edited.
        FormatError: another release has sealed the image.
    """
    path = ticket_path(slot)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        ticket = decode_record(Ticket, content, path)
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
