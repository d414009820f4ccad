"""The files that a manifest names; of a step with thousands, in parts of the manifest.

A rank that waits for its commit looks at its own files only. With one file for all ranks, each of
4,096 ranks would read, and check, the 3 MB of the others. So a manifest with more than `PART_FILES`
files names parts, with their digests, and each part has the files of consecutive ranks. The parts
are durable before the manifest is renamed, which stays the commit. They are named by their content,
so those of an earlier manifest of the step stay readable until it is replaced.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from trinity_sync.fs.atomic import (
    REMOVED_PREFIX,
    TEMPORARY_SUFFIX,
    read_uncached,
    replace_file,
)
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    ROOT_FORMAT,
    shard_file,
)

PART_FILES = 1000
"""Most files in a manifest without parts, and in a part."""

_NAME = re.compile(r"manifest-[0-9a-f]{16}\.json")
_OWN = (MANIFEST, FULL_CHECKPOINT_MARK, CORRUPTION_MARK)


def is_own_file(path: str) -> bool:
    """Return whether a file below a step's folder is part of no save: trinity_sync manages it.

    ``path`` is below that folder, with ``/``. The manifest, its parts and the marks are at the top
    of the folder; a file of that name further down is a user's. Temporary files, and what NFS keeps
    of removed files, are anywhere.
    """
    name = path.rpartition("/")[2]
    passing = name.endswith(TEMPORARY_SUFFIX) or name.startswith(REMOVED_PREFIX)
    return passing or path in _OWN or bool(_NAME.fullmatch(path))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a committed step."""

    path: str
    """Path below the step's folder, with ``/``."""
    nbytes: Count
    digest: str
    role: str = ""
    component: str = ""
    rank: Count = 0
    world_size: Count = 0
    images: tuple[str, ...] = ()
    """Random names of the images that were committed as this file, as in their tickets: several
    where a state was submitted again, none for the files of a callable save."""

    def merge(self, later: "FileRecord | None") -> "FileRecord":
        """Return the record after a later commit, whose record is None if it lacks the path.

        It has the images of both commits if the content is the same, otherwise the later ones.
        """
        if later is None:
            return self
        images = dict.fromkeys(
            (*self.images, *later.images) if self.digest == later.digest else later.images
        )
        return replace(later, images=tuple(images))

    @property
    def is_shard(self) -> bool:
        """Whether the file is the shard of one rank, rather than one of several small files."""
        name = shard_file(self.component, self.world_size, self.rank)
        return PurePosixPath(self.path).name == name

    @property
    def is_distcp(self) -> bool:
        """Whether the file is one rank's of DCP or Megatron, which only they read."""
        return self.path.endswith(".distcp")

    @property
    def is_weights(self) -> bool:
        """Whether the file has weights, in a format that readers and exports understand."""
        return self.component == "model" and not self.is_distcp


@dataclass(frozen=True)
class ManifestPart:
    """What a manifest says of one of its parts."""

    name: str
    """Name of the part's file in the step's folder: ``manifest-<start of its digest>.json``."""
    digest: str
    """SHA-256 of the part's file."""
    first_rank: Count
    last_rank: Count
    roles: tuple[str, ...]
    nbytes: Count
    """Total bytes of the files in the part."""

    def has_rank(self, ranks: Collection[int] | None) -> bool:
        """Return whether the part may have files of one of some ranks; None stands for all."""
        return ranks is None or any(self.first_rank <= rank <= self.last_rank for rank in ranks)


@dataclass(frozen=True)
class _Part(Record, format=ROOT_FORMAT):
    """Content of a part."""

    run: Count
    step: Count
    files: tuple[FileRecord, ...]


def write_parts(
    folder: Path, run: int, step: int, files: Collection[FileRecord]
) -> tuple[ManifestPart, ...]:
    """Write the parts of a manifest that is written next, durably; none if the files are few."""
    if len(files) <= PART_FILES:
        return ()
    ordered = sorted(files, key=lambda record: (record.rank, record.path))
    cuts = range(0, len(ordered), PART_FILES)
    return tuple(_write_part(folder, run, step, ordered[cut : cut + PART_FILES]) for cut in cuts)


def _write_part(folder: Path, run: int, step: int, files: Sequence[FileRecord]) -> ManifestPart:
    content = encode_record(_Part(run, step, tuple(files))).encode()
    digest = hashlib.sha256(content).hexdigest()
    part = ManifestPart(
        name=f"manifest-{digest[:16]}.json",
        digest=digest,
        first_rank=files[0].rank,
        last_rank=files[-1].rank,
        roles=tuple(sorted({record.role for record in files if record.role})),
        nbytes=sum(record.nbytes for record in files),
    )
    replace_file(folder / part.name, content)
    return part


def read_parts(
    folder: Path, parts: Sequence[ManifestPart], ranks: Collection[int] | None
) -> list[FileRecord]:
    """Return the files in the parts of a manifest; None stands for all ranks.

    Files of other ranks that are in the same parts are among them.

    Raises:
        ValueError: a part is torn or was altered.
        FileNotFoundError: a part is missing.
        FormatError: another release has written it.
    """
    files: list[FileRecord] = []
    for part in parts:
        if not part.has_rank(ranks):
            continue
        if not _NAME.fullmatch(part.name):
            raise ValueError(f"its part {part.name} is not a part's name")
        content = read_uncached(folder / part.name)
        if hashlib.sha256(content).hexdigest() != part.digest:
            raise ValueError(f"its part {part.name} differs from its digest")
        files += decode_record(_Part, content, folder / part.name).files
    return files


def remove_other_parts(folder: Path, parts: Sequence[ManifestPart]) -> None:
    """Remove the parts in a step's folder that are not among ``parts``, which its manifest names.

    Raises:
        OSError: they cannot be removed, and take space until the step is removed.
    """
    named = {part.name for part in parts}
    for path in folder.glob("manifest-*.json"):
        if _NAME.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)
