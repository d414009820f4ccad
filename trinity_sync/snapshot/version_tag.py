"""The tag of which version of the weights the bytes of a slot are, for readers on this node.

A slot with a sealed image and a free slot may both have a tag. The stager removes it, under the
slot's exclusive lock, before it writes the first byte of the next image. So a reader that finds the
tag under the slot's shared lock has the version's bytes until it releases the lock.
"""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import TRAINER, Count, Record, encode_record, read_record
from trinity_sync.layout import SPOOL_FORMAT

PUBLISHED_SUFFIX = ".published"


@dataclass(frozen=True)
class VersionTag(Record, format=SPOOL_FORMAT, writer=TRAINER):
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


def version_tag_path(slot: Path) -> Path:
    """Return the path of the tag of ``slot``, which may not exist."""
    return slot.with_name(slot.name + PUBLISHED_SUFFIX)


def write_version_tag(slot: Path, published: VersionTag) -> None:
    """Write the tag of a slot; call it while the bytes cannot change."""
    replace_file(version_tag_path(slot), encode_record(published), sync=False, own_name=False)


def read_version_tag(slot: Path) -> VersionTag | None:
    """Return the tag of a slot; None if it is missing, torn or altered.

    Raises:
        FormatError: another release has written it, so this one cannot read the image either.
    """
    return read_record(VersionTag, version_tag_path(slot))
