"""Which steps of a root can be loaded."""

import logging
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

from trinity_sync.errors import CommitError, FormatError, ManifestError
from trinity_sync.fs.records import decode_body
from trinity_sync.layout import (
    MANIFEST,
    PRIVATE_FOLDER,
    ROOT_FORMAT,
    Kind,
    step_folder,
    steps_on_disk,
)
from trinity_sync.storage.corruption import damage_of
from trinity_sync.storage.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)


def committed_steps(root: str | Path) -> Iterator[Manifest]:
    """The commits under ``root``, by step; what cannot be read is passed over with a warning."""
    for _, found in _manifests(root):
        if isinstance(found, Manifest):
            yield found
        else:
            logger.warning("%s", found)


def _manifests(root: str | Path) -> Iterator[tuple[int, Manifest | FormatError]]:
    """The commits under ``root``, by step; a broken manifest is passed over with a warning."""
    for step in steps_on_disk(root):
        try:
            manifest = read_manifest(root, step)
        except FormatError as error:
            yield step, error
        except ManifestError as error:
            logger.warning("%s", error)
        else:
            if manifest:
                yield step, manifest


def records_of_other_releases(root: str | Path) -> list[FormatError]:
    """Why records below ``root/.trinity_sync`` cannot be read that other releases have written."""
    private, found = Path(root) / PRIVATE_FOLDER, []
    for pattern in ("*.json", "*/*.json", "*/*.wish"):
        for path in sorted(private.glob(pattern)):
            try:
                decode_body(path.read_bytes(), path, ROOT_FORMAT)
            except FormatError as error:
                found.append(error)
            except (OSError, ValueError):
                continue  # said by whoever reads it
    return found


def is_foreign(folder: Path) -> bool:
    """Whether another system has saved the step in a folder: there is no manifest."""
    return folder.is_dir() and not (folder / MANIFEST).exists()


def newest(root: str | Path, kind: Kind = "checkpoint") -> Manifest | None:
    """The commit to resume from: the last step of the last run that committed one.

    Manifests decide, not the iteration file: that may lag behind them after a crash.

    Raises:
        FormatError: a step that counts as newer was committed by another release, so nobody can
            tell whether it is one to resume from.
    """
    for manifest in newest_first(root, kind):
        try:
            return require_committed(root, manifest.step)
        except CommitError as error:
            logger.warning("%s", error)
    return None


def newest_first(root: str | Path, kind: Kind) -> Iterator[Manifest]:
    """The commits of ``kind``, the last step of the last run first.

    Raises:
        FormatError: as `newest`, when it is the turn of such a step.
    """
    found = {
        (each.run or 0, step): each
        for step, each in _manifests(root)
        if isinstance(each, FormatError) or kind in each.kinds
    }
    for _, each in sorted(found.items(), reverse=True):
        if isinstance(each, FormatError):
            raise each
        yield each


def require_committed(root: str | Path, step: int) -> Manifest:
    """The manifest of a step whose files are all there in their full size, and not known as bad.

    Raises:
        CommitError: the step is not committed, files are missing or cut, or a verification found
            it damaged.
    """
    manifest = read_manifest(root, step)
    if manifest is None:
        raise CommitError(
            f"step {step} in {root} is not committed: {step_folder(root, step)} has no manifest. "
            f"Name a committed step (trinity-sync ls {root} shows them)."
        )
    require_whole(root, manifest)
    return manifest


def require_unreplaced(root: str | Path, manifest: Manifest) -> None:
    """See that no other run has replaced a step since its manifest was read.

    A later run that commits a step again exchanges its folder, leases or not. So files that were
    opened between the two looks are those of the manifest, and what is open or mapped stays so.

    Raises:
        CommitError: another run has replaced the step, or it was removed.
    """
    now = read_manifest(root, manifest.step)
    if now is None or now.run != manifest.run:
        found = "it is gone" if now is None else f"run {now.run} has replaced it"
        raise CommitError(
            f"step {manifest.step} in {root} changed while it was read: it was that of run "
            f"{manifest.run}, and {found}. Nothing of what was read counts; read it again."
        )


def _size_of(path: Path) -> int | None:
    """Bytes of a regular file; None if there is none, or no longer."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def require_whole(root: str | Path, manifest: Manifest) -> None:
    """See that the files of a manifest are there in their full size, and not known as bad.

    Raises:
        CommitError: they are not.
    """
    step, folder = manifest.step, step_folder(root, manifest.step)
    for record in manifest.files:
        path = folder / record.path
        found = _size_of(path)
        if found != record.nbytes:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise CommitError(
                f"step {step} in {root} is damaged: {path} {state}, the manifest says "
                f"{record.nbytes:,}. Take another step (trinity-sync ls shows them)."
            )
    if damage := damage_of(root, step):
        raise CommitError(
            f"step {step} in {root} is damaged: {damage}. Take another step (trinity-sync ls shows "
            f"them), or restore the files from a copy and run: trinity-sync verify {root} --step "
            f"{step}"
        )
