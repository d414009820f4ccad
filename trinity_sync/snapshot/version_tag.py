"""A note beside a slot: which version of the weights its bytes are, for readers of this node.

It lies beside a sealed image as well as beside a free slot, and means the same there. The stager
removes it, under the slot's exclusive lock, before it writes the first byte of the next image. So
whoever holds the slot's lock, shared is enough, and finds the note that was looked for, has the
version's bytes until the lock is given back.
"""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import (
    TRAINER,
    Count,
    Record,
    encode_record,
    read_spool_record,
)
from trinity_sync.layout import SPOOL_FORMAT

PUBLISHED_SUFFIX = ".published"


@dataclass(frozen=True)
class Published(Record, format=SPOOL_FORMAT, writer=TRAINER):
    """What the bytes of a slot are."""

    image: str
    """Random name of the image; that of its ticket, where it has one."""
    run: Count
    step: Count
    role: str
    rank: Count
    world_size: Count
    nbytes: Count
    layout: str
    """Digest of all but the tensors' data: images of one layout hold the same tensors at the same
    places."""


def published_path(slot: Path) -> Path:
    """Where the note of ``slot`` is, or will be."""
    return slot.with_name(slot.name + PUBLISHED_SUFFIX)


def publish(slot: Path, published: Published) -> None:
    """Leave the note; call it while the bytes cannot change."""
    replace_file(published_path(slot), encode_record(published), sync=False, own_name=False)


def published_in(slot: Path) -> Published | None:
    """What the slot's note says; None without one, and with one that is torn or altered.

    Raises:
        FormatError: another release has written it, so this one cannot read the image either.
    """
    return read_spool_record(Published, published_path(slot))


def withdraw(slot: Path) -> None:
    """Remove the note; call it under the slot's exclusive lock, before the bytes change."""
    published_path(slot).unlink(missing_ok=True)
