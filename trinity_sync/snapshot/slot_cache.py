"""A note beside a free slot: which committed file its bytes still are.

A commit frees a slot, and the image in it stays until the slot is filled again. The note, which the
commit leaves and the next filling removes before it writes the first byte, lets a trainer that is
started again find the image. It only says where to look: whoever reads such a slot holds its lock
and compares the digest of the bytes with the one in the step's manifest.
"""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import STACK, Count, Record, encode_record, read_spool_record
from trinity_sync.layout import SPOOL_FORMAT

KEPT_SUFFIX = ".kept"


@dataclass(frozen=True)
class CachedFile(Record, format=SPOOL_FORMAT, writer=STACK):
    """What the bytes of a free slot are."""

    step: Count
    path: str
    """File below the step's folder."""
    nbytes: Count
    file_digest: str
    """As in the step's manifest."""


def cached_file_path(slot: Path) -> Path:
    """Where the note of ``slot`` is, or will be."""
    return slot.with_name(slot.name + KEPT_SUFFIX)


def write_cached_file(slot: Path, kept: CachedFile) -> None:
    """Leave the note; call it under the slot's lock."""
    replace_file(cached_file_path(slot), encode_record(kept), sync=False, own_name=False)


def read_cached_file(slot: Path) -> CachedFile | None:
    """What the slot's note says; None without one, and with one that is torn or altered.

    Raises:
        FormatError: another release has written it.
    """
    return read_spool_record(CachedFile, cached_file_path(slot))


def remove_cached_file(slot: Path) -> None:
    """Remove the note; call it under the slot's lock, before the bytes change."""
    cached_file_path(slot).unlink(missing_ok=True)
