"""Which steps of a root can be loaded, and the one judgement of the state of a step.

Every command, page, check and policy asks `step_state`, which looks at the manifest, at the sizes
of the files that it names, and at the mark of a verification. Digests are compared by loading and
by `verify`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from trinity_sync.errors import (
    CommitError,
    FormatError,
    ManifestError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.records import decode_body
from trinity_sync.layout import (
    MANIFEST,
    PRIVATE_FOLDER,
    ROOT_FORMAT,
    Kind,
    step_folder,
    steps_on_disk,
)
from trinity_sync.storage.corruption import read_corruption
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.runs import Run, find_superseding_run, list_runs

logger = logging.getLogger(__name__)

State = Literal["valid", "corrupted", "not committed", "superseded", "another format"]
"""``superseded``: committed, and a later run went on from an earlier step; ``another format``:
committed by another release."""


@dataclass(frozen=True)
class StepState:
    """The state of one step."""

    step: int
    state: State
    manifest: Manifest | None
    """None where there is none that this release can read."""
    error: TrinitySyncError | None
    """Why it is not valid; None for a valid step."""

    @property
    def reason(self) -> str:
        """Why it is not valid, in words; empty for a valid step."""
        return str(self.error or "")

    def require_loadable(self) -> Manifest:
        """Return the manifest of a step that can be loaded, superseded or not.

        Raises:
            CommitError: the step is not committed, or corrupted.
            FormatError: another release has committed it.
        """
        if self.manifest is None or self.state == "corrupted":
            assert self.error is not None
            raise self.error
        return self.manifest


def step_state(root: str | Path, step: int, runs: Sequence[Run] | None = None) -> StepState:
    """Return the state of a step.

    Args:
        root: the job's root.
        step: which one; it need not exist.
        runs: of the job, by which a step is superseded; `known_runs` of the root by default.
    """
    try:
        manifest = read_manifest(root, step)
    except FormatError as error:
        return StepState(step, "another format", None, error)
    except ManifestError as error:
        return StepState(step, "corrupted", None, error)
    if manifest is None:
        missing = CommitError(
            f"step {step} in {root} is not committed: {step_folder(root, step)} has no manifest. "
            f"Name a committed step (trinity-sync ls {root} shows them)."
        )
        return StepState(step, "not committed", None, missing)
    return manifest_state(root, manifest, runs)


def manifest_state(
    root: str | Path, manifest: Manifest, runs: Sequence[Run] | None = None
) -> StepState:
    """Return the state of a step whose manifest was read.

    Args:
        root: the job's root.
        manifest: of the step.
        runs: as in `step_state`.
    """
    step = manifest.step
    if error := _corruption_error(root, manifest):
        return StepState(step, "corrupted", manifest, error)
    runs = known_runs(root) if runs is None else runs
    if later := find_superseding_run(runs, manifest.run, step):
        superseded = SupersededError(
            f"step {step} of run {manifest.run} in {root} is superseded: run {later.number} "
            f"resumed from step {later.resumed_from}"
        )
        return StepState(step, "superseded", manifest, superseded)
    return StepState(step, "valid", manifest, None)


def known_runs(root: str | Path) -> list[Run]:
    """Return the runs of a job; none if a record of them cannot be read, which is logged."""
    try:
        return list_runs(root)
    except (CommitError, FormatError) as error:
        logger.warning("superseded steps of %s are unknown: %s", root, error)
        return []


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
    for pattern in ("*.json", "*/*.json", "*/*.request"):
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
    """Return the manifest of a committed step that is not corrupted.

    Args:
        root: the job's root.
        step: which one; it may be superseded.

    Raises:
        CommitError: the step is not committed, files are missing or truncated, or a verification
            found it corrupted.
        FormatError: another release has committed it.
    """
    return step_state(root, step, runs=()).require_loadable()


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


def _corruption_error(root: str | Path, manifest: Manifest) -> CommitError | None:
    """Return why the files of a manifest cannot be loaded, as far as sizes and marks say."""
    step, folder = manifest.step, step_folder(root, manifest.step)
    for record in manifest.files:
        path = folder / record.path
        found = _size_of(path)
        if found != record.nbytes:
            state = "is missing" if found is None else f"has {found:,} bytes"
            return CommitError(
                f"step {step} in {root} is corrupted: {path} {state}, the manifest says "
                f"{record.nbytes:,}. Take another step (trinity-sync ls shows them)."
            )
    if corruption := read_corruption(root, step):
        return CommitError(
            f"step {step} in {root} is corrupted: {corruption}. Take another step (trinity-sync ls "
            "shows them), or restore the files from a copy and run: "
            f"trinity-sync verify {root} --step {step}"
        )
    return None
