"""``global_step_N/manifest.json``: every file of a step. Its atomic appearance is the commit."""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from trinity_sync.errors import FormatError, ManifestError
from trinity_sync.fs.atomic import read_uncached, replace_file
from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import MANIFEST, ROOT_FORMAT, Kind, is_below, shard_file, step_folder


@dataclass(frozen=True)
class FileRecord:
    """One file of a step."""

    path: str
    """Below the step's folder, with ``/``."""
    nbytes: Count
    digest: str
    role: str = ""
    component: str = ""
    rank: Count = 0
    world_size: Count = 0
    images: tuple[str, ...] = ()
    """Random names of the images that were committed as this file, as in their tickets: several
    where a state was submitted again, none for the files of a user's function."""

    def joined(self, later: "FileRecord | None") -> "FileRecord":
        """The record of a later commit of the same path, with the images of both; else this one."""
        if later is None:
            return self
        images = dict.fromkeys(
            (*self.images, *later.images) if self.digest == later.digest else later.images
        )
        return replace(later, images=tuple(images))

    @property
    def is_shard(self) -> bool:
        """Whether it is all of one rank's state, and not one of several small files."""
        name = shard_file(self.component, self.world_size, self.rank)
        return PurePosixPath(self.path).name == name


@dataclass(frozen=True)
class ReceiptRecord:
    """One save by a user's function."""

    name: str
    rank: Count
    seconds: Seconds
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest(Record, format=ROOT_FORMAT):
    """What a committed step consists of."""

    job: str
    run: Count
    step: Count
    kinds: tuple[Kind, ...]
    files: tuple[FileRecord, ...]
    receipts: tuple[ReceiptRecord, ...]
    committed_at: Seconds
    """Seconds since the epoch, of the newest of the step's commits."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.nbytes for record in self.files)

    @property
    def images(self) -> frozenset[str]:
        """Names of the images that were committed with the step."""
        return frozenset(image for record in self.files for image in record.images)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have a shard in this step."""
        return tuple(sorted({record.role for record in self.files if record.role}))

    def holds(self, kind: Kind, roles: Iterable[str] = ()) -> bool:
        """Whether ``kind`` was committed, with files of all ``roles``: each may have a sync."""
        return kind in self.kinds and {*roles} <= {*self.roles}

    def file(self, path: str) -> FileRecord | None:
        """The record of the file at ``path``, or None."""
        return next((record for record in self.files if record.path == path), None)

    def joined(self, later: "Manifest") -> "Manifest":
        """This commit and a later one of the same run and step, e.g. the sync and the rest."""
        theirs = {record.path: record for record in later.files}
        names = {(receipt.name, receipt.rank) for receipt in later.receipts}
        return replace(
            later,
            kinds=tuple(sorted({*self.kinds, *later.kinds})),
            files=_by_path(
                [*(f.joined(theirs.pop(f.path, None)) for f in self.files), *theirs.values()]
            ),
            receipts=(
                *(r for r in self.receipts if (r.name, r.rank) not in names),
                *later.receipts,
            ),
        )


def write_manifest(root: str | Path, manifest: Manifest) -> None:
    """Commit: put the manifest into its step's folder, atomically and durably."""
    write_manifest_into(step_folder(root, manifest.step), manifest)


def write_manifest_into(folder: Path, manifest: Manifest) -> None:
    """As `write_manifest`, into a folder that is yet to become the step's."""
    manifest = replace(manifest, files=_by_path(manifest.files))
    # thousands of files are not for reading, and indenting takes ten times as long
    indent = 1 if len(manifest.files) < 1000 else None
    replace_file(folder / MANIFEST, encode_record(manifest, indent=indent))


def read_manifest(root: str | Path, step: int) -> Manifest | None:
    """The manifest of a step, or None if the step is not committed.

    Raises:
        ManifestError: there is one, and it is torn or altered.
        FormatError: another release has written it.
    """
    path = step_folder(root, step) / MANIFEST
    try:
        content = read_uncached(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise _bad(path, f"is no file ({error.strerror})") from error
    return parse_manifest(content, path, step)


def parse_manifest(content: bytes, path: Path | str, step: int) -> Manifest:
    """The manifest in a file's bytes.

    Args:
        content: of the file.
        path: where it was found, for messages.
        step: the step whose folder that is.

    Raises:
        ManifestError, FormatError: as `read_manifest`.
    """
    try:
        manifest = decode_record(Manifest, content, path)
    except ValueError as error:
        raise _bad(path, f"is torn or edited ({error})") from error
    if manifest.step != step:
        raise _bad(path, "is not that of this folder")
    named = [record.path for record in manifest.files]
    named += [name for receipt in manifest.receipts for name in receipt.files]
    named += {record.role for record in manifest.files if record.role}
    if not all(map(is_below, named)):
        raise _bad(path, "names a file outside of the step's folder")
    return manifest


def read_run_number(root: str | Path, step: int) -> int:
    """Run that committed ``step``; 0 if none did, as for a checkpoint of another system."""
    try:
        manifest = read_manifest(root, step)
    except ManifestError:
        return 0
    except FormatError as error:
        return error.run or 0
    return manifest.run if manifest else 0


def read_own_manifest(root: str | Path, run: int, step: int) -> Manifest | None:
    """What this very run has committed of a step; None if that is nothing, or nobody can tell.

    Raises:
        FormatError: another release has committed the step for this run.
    """
    try:
        manifest = read_manifest(root, step)
    except FormatError as error:
        if error.run == run:
            raise
        return None
    except (ManifestError, OSError):
        return None
    return manifest if manifest and manifest.run == run else None


def is_committed(
    root: str | Path, run: int, step: int, kind: Kind, roles: Iterable[str] = ()
) -> bool:
    """Whether this very run has committed ``kind`` of the step; False if nobody can tell."""
    manifest = read_own_manifest(root, run, step)
    return manifest is not None and manifest.holds(kind, roles)


def _by_path(records: Sequence[FileRecord]) -> tuple[FileRecord, ...]:
    return tuple(sorted(records, key=lambda record: record.path))


def _bad(path: Path | str, why: str) -> ManifestError:
    return ManifestError(
        f"manifest {path} {why}; the step does not count as committed. "
        "Restore the file from a copy, or remove the step's folder."
    )
