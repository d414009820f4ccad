"""Discovery of the committed steps of a root, and the state of each step.

Commands, the report, checks and policies all use `read_step_state`. It reads the manifest, the
sizes of the files in it, and the corruption mark of a verification. Digests are compared by
loading and by `verify`.

``global_step_N/corrupted.json`` is the corruption mark of a verification. It lists the corrupted
files and the time of the verification; the files are not changed. A marked step counts as not
loadable everywhere, until a verification finds it valid again, e.g. after the files were restored
from a copy.

``latest_*_iteration.txt`` are the latest pointers, from which veRL and Trinity resume and sync.
They are updated after the manifest, atomically, and only forward: by step within a run, and a later
run counts as newer than every earlier run, because it resumed from an earlier step on purpose. A
step of another system, which has no manifest, belongs to the run in which the pointer was written.
A pointer moves back only from a corrupted step (`repair_latest_pointer`).

Whatever reads manifests or runs here raises `FormatError` if another release has written one.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from trinity_sync.errors import CommitError, ManifestError, SupersededError, TrinitySyncError
from trinity_sync.fs.atomic import read_file, read_uncached, replace_file, sync_folder, walk_files
from trinity_sync.fs.records import Record, Seconds, decode_record, encode_record
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FULL_CHECKPOINT_MARK,
    ITERATION_FILES,
    KINDS,
    MANIFEST,
    Kind,
    parse_number,
    step_folder,
    steps_on_disk,
)
from trinity_sync.snapshot.identity import OfRun, SaveId, is_of_other_run, read_identity
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    is_own_file,
    read_manifest,
    read_run_number,
)
from trinity_sync.storage.runs import (
    Run,
    find_superseded_steps,
    find_superseding_run,
    list_runs,
    read_start_time,
    run_began_after,
)

logger = logging.getLogger(__name__)

State = Literal["valid", "corrupted", "not committed", "superseded"]
"""``superseded``: committed, and a later run went on from an earlier step."""


@dataclass(frozen=True)
class StepState:
    """State of a step."""

    step: int
    state: State
    manifest: Manifest | None
    """None if there is no manifest, or it is torn."""
    error: TrinitySyncError | None
    """Error that says why it is not valid; None for a valid step."""

    @property
    def reason(self) -> str:
        """Reason why the step is not valid, in words; empty for a valid step."""
        return str(self.error or "")

    def require_loadable(self) -> Manifest:
        """Return the manifest of a step that can be loaded, even if it is superseded.

        Raises:
            CommitError: the step is not committed, or corrupted.
        """
        if self.manifest is None or self.state == "corrupted":
            assert self.error is not None
            raise self.error
        return self.manifest


def read_step_state(
    root: str | Path,
    step: int,
    runs: Sequence[Run] | None = None,
    *,
    paths: Collection[str] | None = None,
) -> StepState:
    """Return the state of a step, which need not exist.

    ``runs`` decide whether it is superseded; they are read from the root by default. ``paths`` are
    as in `require_committed`.
    """
    try:
        manifest = read_manifest(root, step)
    except ManifestError as error:
        return StepState(step, "corrupted", None, error)
    if manifest is None:
        missing = CommitError(
            f"step {step} in {root} is not committed: {step_folder(root, step)} has no manifest. "
            f"Choose a committed step (trinity-sync ls {root} lists them)."
        )
        return StepState(step, "not committed", None, missing)
    return read_manifest_state(root, manifest, runs, paths=paths)


def is_valid(root: str | Path, step: int) -> bool:
    """Return whether a step is committed, and no run has superseded it."""
    return read_step_state(root, step, paths=()).state == "valid"


def read_manifest_state(
    root: str | Path,
    manifest: Manifest,
    runs: Sequence[Run] | None = None,
    *,
    paths: Collection[str] | None = None,
) -> StepState:
    """Return the state of a step whose manifest was read; arguments as in `read_step_state`."""
    step = manifest.step
    if error := _corruption_error(root, manifest, paths):
        now = read_manifest(root, step)
        if now and now.removed and not manifest.removed:  # retention has removed files meanwhile
            return read_manifest_state(root, now, runs, paths=paths)
        return StepState(step, "corrupted", manifest, error)
    runs = list_known_runs(root) if runs is None else runs
    if later := find_superseding_run(runs, manifest.run, step):
        superseded = SupersededError(
            f"step {step} of run {manifest.run} in {root} is superseded: run {later.number} "
            f"resumed from step {later.resumed_from}"
        )
        return StepState(step, "superseded", manifest, superseded)
    return StepState(step, "valid", manifest, None)


def list_known_runs(root: str | Path) -> list[Run]:
    """Return the runs of a job; none, with a warning, if a record of them is torn."""
    try:
        return list_runs(root)
    except CommitError as error:
        logger.warning("cannot tell which steps of %s are superseded: %s", root, error)
        return []


def iter_committed_steps(
    root: str | Path, steps: Iterable[int] | None = None
) -> Iterator[Manifest]:
    """Yield the manifests of the committed steps, by default all; log those that are torn."""
    for step in steps_on_disk(root) if steps is None else steps:
        try:
            manifest = read_manifest(root, step)
        except ManifestError as error:
            logger.warning("%s", error)
        else:
            if manifest:
                yield manifest


SHARDS = ("*_world_size_*_rank_*.pt", "*.distcp", "*.safetensors", "*.bin")
"""Patterns of the names of shards that other systems save in a step's folder."""


def is_foreign(folder: Path) -> bool:
    """Return whether a step's folder was saved by another system: it has shards and no manifest.

    Other files alone, such as the dataloader's position that veRL's driver writes, do not make a
    step: a save that was lost leaves them.
    """
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return False
    return any(map(_is_shard, walk_files(folder)))


def _is_shard(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in SHARDS)


def list_files_of_run(root: str | Path, folder: Path, run: int) -> list[Path] | None:
    """Return the files in a step's folder that were written since a run began.

    None if the folder has no shards of another system, or of a lost save, from before. A file's
    time of change counts, which a copy does not preserve, by the clock of the file system.
    """
    if (folder / MANIFEST).exists():
        return None
    files = [*walk_files(folder)]
    shards = {*filter(_is_shard, files)}
    began, own, earlier = read_start_time(root, run), list[Path](), list[Path]()
    for path in files if shards else ():
        with suppress(FileNotFoundError):  # renamed or removed meanwhile
            (earlier if path.lstat().st_ctime < began else own).append(path)
    return None if shards.isdisjoint(earlier) else own


def find_newest(
    root: str | Path,
    kind: Kind = "checkpoint",
    *,
    healthy: bool = False,
    without: Collection[int] = (),
) -> Manifest | None:
    """Return the manifest to resume from: the last step of the last run that committed one.

    It goes by manifests, not by the latest pointer, which may lag behind after a crash. ``healthy``
    and ``without`` are as in `iter_newest_first`.
    """
    return next(iter_newest_first(root, kind, healthy=healthy, without=without), None)


def list_newest_first(
    root: str | Path, kind: Kind, *, without: Collection[int] = (), reduced: bool = False
) -> list[Manifest]:
    """Return the manifests of `iter_newest_first`, also of corrupted steps: no file is looked at.

    ``reduced`` adds the steps of which retention has kept the weights, and merges.
    """
    every = (each for each in iter_committed_steps(root) if each.step not in without)
    found = [each for each in every if each.serves(kind) or (reduced and each.is_reduced)]
    superseded = find_superseded_steps(found, list_known_runs(root))
    counting = (each for each in found if each.step not in superseded)
    return sorted(counting, key=lambda each: (each.run, each.step), reverse=True)


def iter_newest_first(
    root: str | Path, kind: Kind, *, healthy: bool = False, without: Collection[int] = ()
) -> Iterator[Manifest]:
    """Yield the manifests of the valid steps of a kind, the last step of the last run first.

    Superseded steps are left out, see `find_superseded_steps`; those ``without`` supersede none.
    ``healthy`` excludes steps with values that are not finite.
    """
    for manifest in list_newest_first(root, kind, without=without):
        if healthy and manifest.nonfinite:
            logger.warning("step %d in %s has %s", manifest.step, root, manifest.nonfinite)
            continue
        try:
            yield require_committed(root, manifest.step)
        except CommitError as error:
            logger.warning("%s", error)


def require_committed(
    root: str | Path, step: int, *, paths: Collection[str] | None = None
) -> Manifest:
    """Return the manifest of a committed step that is not corrupted; it may be superseded.

    It asks for the size of every file of the step, which on a file server takes a call for each. So
    of the ranks of a job, one does it for all (`client.collective.lease_on_rank_0`). A reader of
    few files limits it to their ``paths`` below the step's folder; a step to resume from is not
    chosen that way.

    Raises:
        CommitError: the step is not committed, files are missing or truncated, or a verification
            found it corrupted.
    """
    return read_step_state(root, step, runs=(), paths=paths).require_loadable()


def require_whole(root: str | Path, manifest: Manifest | None) -> None:
    """Raise `CommitError`, which names the newest whole step, if a step has weights only."""
    if manifest and manifest.removed:
        newest = find_newest(root)
        raise CommitError(
            f"step {manifest.step} in {root} has weights only: retention has removed "
            f"{' and '.join(manifest.removed)}. Resume from {newest.step if newest else 'none'}, "
            f'the newest whole step; or load({manifest.step}, only=("model",))'
        )


def require_unreplaced(root: str | Path, manifest: Manifest) -> None:
    """Require that no other run has replaced a step since its manifest was read.

    A later run that commits a step again exchanges its folder, despite leases. Files that were
    opened between the two reads of the manifest belong to it, and stay so while they are open or
    mapped.

    Raises:
        CommitError: another run has replaced the step, or it was removed.
    """
    now = read_manifest(root, manifest.step, ranks=())
    require_run(root, now, manifest, "Discard what was read, and read it again.")


def require_run(
    root: str | Path, now: Manifest | None, found: OfRun, hint: str, identity: str = ""
) -> None:
    """Require that a step is ``now`` what was found, in the job of an identity if it is known.

    Raises:
        CommitError: it is not, and the message ends with the ``hint``.
    """
    is_other_job = identity and read_identity(root) != identity
    if now is None or is_other_job or is_of_other_run(now, found):
        how = f"run {now.run} has replaced it" if now else "it is gone"
        raise CommitError(
            f"step {found.step} of run {found.run} in {root}: {how}, or the root was restored. "
            f"{hint}"
        )


def list_unnamed_files(root: str | Path, manifest: Manifest) -> list[str]:
    """Return the files in a step's folder that its commit does not contain.

    Other code wrote them, before or after the commit: nothing verifies, copies or keeps them.
    """
    folder, named = step_folder(root, manifest.step), {record.path for record in manifest.files}
    found = {path.relative_to(folder).as_posix() for path in walk_files(folder)} - named
    return sorted(name for name in found if not is_own_file(name))


def list_removed_files(root: str | Path, manifest: Manifest) -> list[Path]:
    """Return the files in a step's folder of the components that retention has removed."""
    folder, names = step_folder(root, manifest.step), "|".join(manifest.removed)
    shard = re.compile(rf"[^/]+/({names})_world_size_\d+_rank_\d+\.pt")
    left = list_unnamed_files(root, manifest) if names else ()
    return [folder / name for name in left if shard.fullmatch(name)]


def list_shards(
    root: str | Path, manifest: Manifest, role: str, component: str
) -> list[FileRecord]:
    """Return the records of the shards of a component of a role, by rank.

    Raises:
        CommitError: there are none that ``torch.save`` wrote, or those of some ranks are missing.
    """
    shards = sorted(
        (f for f in manifest.files if (f.role, f.component) == (role, component) and f.is_shard),
        key=lambda shard: shard.rank,
    )
    where = f"step {manifest.step} in {root}"
    if not shards:
        saved = {f"{f.role}/{f.component}" for f in manifest.files if f.role and f.world_size}
        raise CommitError(
            f"{where} has no {component} of role {role} in shards of torch.save (it has "
            f"{', '.join(sorted(saved)) or 'no states'}); {manifest.hint_at_format(role)}"
            f"trinity-sync show {root} {manifest.step} lists its files"
        )
    if [shard.rank for shard in shards] != list(range(shards[0].world_size)):
        raise CommitError(
            f"{where} lacks shards of {component} of role {role}, which "
            f"{shards[0].world_size} ranks saved; choose another step"
        )
    return shards


def _read_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes; None if it is missing."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def _corruption_error(
    root: str | Path, manifest: Manifest, paths: Collection[str] | None
) -> CommitError | None:
    """Return an error if the files of a manifest cannot be loaded, by sizes and marks."""
    step, folder = manifest.step, step_folder(root, manifest.step)
    for record in manifest.files:
        if paths is not None and record.path not in paths:
            continue
        path = folder / record.path
        found = _read_size(path)
        if found != record.nbytes:
            state = "is missing" if found is None else f"has {found:,} bytes"
            return CommitError(
                f"step {step} in {root} is corrupted: {path} {state}, the manifest says "
                f"{record.nbytes:,}. Choose another step (trinity-sync ls lists them)."
            )
    if corruption := read_corruption(root, step):
        return CommitError(
            f"step {step} in {root} is corrupted: {corruption}. Choose another step (trinity-sync "
            "ls lists them), or restore the files from a copy and run: "
            f"trinity-sync verify {root} {step}"
        )
    return None


@dataclass(frozen=True)
class Corruption(Record):
    """The corrupted files of a step, with reasons."""

    files: dict[str, str]
    """Reason by path below the step's folder."""
    verified_at: Seconds
    """Time of the verification, in seconds since the epoch."""

    def __str__(self) -> str:
        named = [f"{path} {wrong}" for path, wrong in sorted(self.files.items())]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        at = datetime.fromtimestamp(self.verified_at).astimezone().isoformat(timespec="seconds")
        return f"{'; '.join(named[:3])}{more}, verified at {at}"


def read_corruption(root: str | Path, step: int) -> Corruption | None:
    """Return the corruption mark of a step, or None; a mark that cannot be read still counts."""
    path = step_folder(root, step) / CORRUPTION_MARK
    try:
        return decode_record(Corruption, read_file(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError):
        return Corruption({CORRUPTION_MARK: "is torn or edited"}, path.lstat().st_mtime)


def mark_corrupted(root: str | Path, step: int, corruption: Corruption) -> None:
    """Mark a step as corrupted, durably.

    Call it under the commit lock, and repair the latest pointers afterwards.
    """
    replace_file(step_folder(root, step) / CORRUPTION_MARK, encode_record(corruption, indent=1))
    logger.error("step %d in %s is corrupted: %s", step, root, corruption)


def remove_mark(folder: Path) -> None:
    """Remove the corruption mark from a step's folder, durably, if there is one."""
    mark = folder / CORRUPTION_MARK
    if mark.exists():
        mark.unlink()
        sync_folder(folder)


def read_latest_pointer(root: str | Path, kind: Kind) -> int | None:
    """Return the step in a latest pointer; None if it is missing, empty, torn or no file."""
    try:
        text = read_uncached(Path(root) / ITERATION_FILES[kind]).decode().strip()
    except (FileNotFoundError, ValueError):
        return None
    return parse_number(text)


def warn_of_other_step(root: str | Path, step: int) -> None:
    """Log a warning if the latest pointer names another step than the newest commit, ``step``.

    It does so after a user has edited it, which has no effect on what is resumed from.
    """
    named = read_latest_pointer(root, "checkpoint")
    if named not in (None, step) and not is_foreign(step_folder(root, named)):
        logger.warning(
            "%s in %s names step %d, and the newest commit is step %d, which counts. To go back to "
            "step %d, run: trinity-sync rewind %s %d",
            *(ITERATION_FILES["checkpoint"], root, named, step, named, root, named),
        )


def update_latest_pointers(root: str | Path, manifest: Manifest) -> None:
    """Mark a checkpoint as full, and update the latest pointers that name no newer step.

    They are not updated to a step that is corrupted. Call it under the commit lock.
    """
    folder = step_folder(root, manifest.step)
    if manifest.serves("checkpoint"):
        replace_file(folder / FULL_CHECKPOINT_MARK, "", sync=False)  # where it is a link, too
    sync_folder(folder)
    if corruption := read_corruption(root, manifest.step):
        logger.error(
            "Not updating the latest pointers to step %d in %s: the step is corrupted (%s)",
            *(manifest.step, root, corruption),
        )
        return
    for kind in manifest.kinds:
        path, current = Path(root) / ITERATION_FILES[kind], read_latest_pointer(root, kind)
        if latest_pointer_covers(root, kind, manifest.run, manifest.step, current):
            continue
        if current is None and path.exists():
            logger.warning("latest pointer %s was empty or torn; writing it again", path)
        replace_file(path, str(manifest.step))


def repair_latest_pointer(
    root: str | Path, kind: Kind, *, without: Collection[int] | None = None
) -> tuple[int | None, int] | None:
    """Update a latest pointer to the newest step that can be loaded. Call it under the commit lock.

    The pointer moves back from a corrupted or missing step, and forward if a commit died before it
    updated the pointer. A step of another system, which has no manifest, is left alone. If no step
    can be loaded, the pointer stays: a resume then fails, instead of starting at step 0 silently.
    A rewind, which removes the steps ``without`` next, moves it back from any step, and removes it
    if no other step can be loaded.

    Return the steps that the pointer named before and after; None if it is unchanged.
    """
    path, current = Path(root) / ITERATION_FILES[kind], read_latest_pointer(root, kind)
    best = find_newest(root, kind, without=without or ())
    if best is None:
        if without is not None and path.exists():
            path.unlink()
            sync_folder(path.parent)
        return None
    if best.step == current:
        return None
    if current is not None and without is None and is_foreign(step_folder(root, current)):
        return None
    replace_file(path, str(best.step))
    logger.warning(
        "updated %s in %s to step %d from %s", ITERATION_FILES[kind], root, best.step, current
    )
    return current, best.step


def latest_pointer_covers(
    root: str | Path, kind: Kind, run: int, step: int, current: int | None
) -> bool:
    """Return whether a latest pointer, which names ``current``, covers a step of a run."""
    if current is None:
        return False
    if is_foreign(step_folder(root, current)):
        return current >= step and not run_began_after(
            root, run, Path(root) / ITERATION_FILES[kind]
        )
    return (read_run_number(root, current), current) >= (run, step)


def list_commits_before(save: SaveId, ranks: Collection[int] | None = None) -> list[Manifest]:
    """Return the commits of earlier steps that the latest pointers name, the newest first.

    ``ranks`` are as in `read_manifest`.
    """
    found = {}
    for kind in KINDS:
        try:
            step = read_latest_pointer(save.root, kind)
            if step is not None and step < save.step and step not in found:
                found[step] = read_manifest(save.root, step, ranks=ranks)
        except (TrinitySyncError, OSError) as error:  # of a step that is corrupted, and reported
            logger.info("%s is not compared with the %s before: %s", save, kind, error)
    return [manifest for _, manifest in sorted(found.items(), reverse=True) if manifest]
