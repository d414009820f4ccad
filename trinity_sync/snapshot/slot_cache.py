"""The record of which committed file the bytes of a free slot still are.

A commit frees a slot, and the image stays in it until the slot is filled again. The commit leaves a
record beside the slot, by which a restarted trainer finds the image; the next filling removes the
record before it writes the first byte. The record only says where to look: a reader holds the
slot's lock and compares the digest of the bytes with the one in the step's manifest.
"""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.records import STACK, Count, Record, encode_record, read_record
from trinity_sync.layout import SPOOL_FORMAT

KEPT_SUFFIX = ".kept"


@dataclass(frozen=True)
class CachedFile(Record, format=SPOOL_FORMAT, writer=STACK):
    """A committed file that a free slot still holds."""

    step: Count
    path: str
    """File below the step's folder."""
    nbytes: Count
    file_digest: str
    """Digest of the file, as in the step's manifest."""


def cached_file_path(slot: Path) -> Path:
    """Return the path of the record of ``slot``, which may not exist."""
    return slot.with_name(slot.name + KEPT_SUFFIX)


def write_cached_file(slot: Path, kept: CachedFile) -> None:
    """Write the record of a slot; call it under the slot's lock."""
    replace_file(cached_file_path(slot), encode_record(kept), sync=False, own_name=False)


def read_cached_file(slot: Path) -> CachedFile | None:
    """Return the record of a slot; None if it is missing, torn or altered.

    Raises:
        FormatError: another release has written it.
    """
    return read_record(CachedFile, cached_file_path(slot))
