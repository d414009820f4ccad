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
class VersionTag(Record, format=SPOOL_FORMAT, writer=TRAINER):
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


def version_tag_path(slot: Path) -> Path:
    """Where the note of ``slot`` is, or will be."""
    return slot.with_name(slot.name + PUBLISHED_SUFFIX)


def write_version_tag(slot: Path, published: VersionTag) -> None:
    """Leave the note; call it while the bytes cannot change."""
    replace_file(version_tag_path(slot), encode_record(published), sync=False, own_name=False)


def read_version_tag(slot: Path) -> VersionTag | None:
    """What the slot's note says; None without one, and with one that is torn or altered.

    Raises:
        FormatError: another release has written it, so this one cannot read the image either.
    """
    return read_spool_record(VersionTag, version_tag_path(slot))


def remove_version_tag(slot: Path) -> None:
    """Remove the note; call it under the slot's exclusive lock, before the bytes change."""
    version_tag_path(slot).unlink(missing_ok=True)
