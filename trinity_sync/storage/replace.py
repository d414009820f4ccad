"""Replacement of a step that an earlier run committed, by one exchange of two folders.

A commit never loses the newest step of a kind: a sync either leaves a checkpoint with the same
weights in place, or is refused.

`displace_step` makes room for a save function. A function computes the paths below
``root/global_step_{N}`` by itself, so the commit that readers find there moves away as a whole: see
"Save functions" in ``docs/contributing/design.md``.

Some steps that others replace are quarantined instead of removed, as those of a rewind are::

    root/.trinity_sync/quarantine/20260102T030405Z/
      global_step_50/                   unchanged; rename it back to undo
    root/.trinity_sync/quarantine/pinned-of-run-1/
      global_step_40/                   was pinned when a later run replaced it; never pruned

If a run began at step 0 although the root had steps, its user may have forgotten to load or named
the root of another training. So it, and each run that continues it, quarantines the earlier steps
that its commits replace, in a folder named after the time at which the run began. A run that
continues the training quarantines the pinned steps that it replaces, and removes the others. Steps
of another system are quarantined by any run.
"""

import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

from trinity_sync.errors import ManifestError, SaveError, SupersededError
from trinity_sync.fs.atomic import (
    TEMPORARY_SUFFIX,
    UNWRITABLE,
    exchange_names,
    is_temporary,
    link_or_copy,
    make_folder,
    move,
    remove_file,
    sync_folder,
    walk_files,
)
from trinity_sync.fs.locks import LIMIT_S, LockFile, acquire_commit_lock, open_lock_file
from trinity_sync.fs.process import describe_this_process
from trinity_sync.layout import PRIVATE_FOLDER, SERVES_AS, Kind, step_folder
from trinity_sync.snapshot.identity import SaveId, require_root
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.discovery import (
    find_newest,
    list_files_of_run,
    read_manifest_state,
    read_step_state,
    repair_latest_pointer,
)
from trinity_sync.storage.manifest import (
    Manifest,
    is_own_file,
    read_manifest,
    read_run_number,
    write_manifest_into,
)
from trinity_sync.storage.persist import parse_image_name
from trinity_sync.storage.runs import (
    list_runs,
    read_restart_time,
    read_start_time,
    refuse_superseded,
)
from trinity_sync.storage.steps_in_use import acquire_removal_lock, is_pinned, list_leases
from trinity_sync.storage.uncommitted import Written

logger = logging.getLogger(__name__)

TIME_FORMAT = "%Y%m%dT%H%M%SZ"
"""Name of a folder in quarantine that is named after a time."""


def quarantine_folder(root: str | Path) -> Path:
    """Return the folder that has a quarantine folder for each rewind or run."""
    return Path(root) / PRIVATE_FOLDER / "quarantine"


def replacing_folder(root: str | Path) -> Path:
    """Return the folder for steps that replace others; a replaced step moves there."""
    return Path(root) / PRIVATE_FOLDER / "replacing"


def fetching_folder(root: str | Path) -> Path:
    """Return the folder in which steps are downloaded from a remote."""
    return Path(root) / PRIVATE_FOLDER / "fetching"


def timed_folder(root: str | Path, at: float) -> Path:
    """Return the folder in quarantine that is named after a time, in seconds since the epoch."""
    return quarantine_folder(root) / time.strftime(TIME_FORMAT, time.gmtime(at))


def is_redundant_sync(save: SaveId, earlier: Manifest, manifest: Manifest) -> bool:
    """Return whether a sync has the same files as an earlier run's checkpoint of the step.

    The checkpoint then stays, or what retention has left of it. This happens when a run begins with
    a sync of the step that it loaded.
    """
    is_left = earlier.removed and not manifest.serves("checkpoint")
    if not (is_left or earlier.list_lost(manifest.kinds)):
        return False
    held = {record.path: record.digest for record in earlier.files}
    return read_manifest_state(save.root, earlier, runs=()).state == "valid" and all(
        held.get(record.path) == record.digest for record in manifest.files
    )


def refuse_loss(save: SaveId, earlier: Manifest | None, kinds: Collection[Kind]) -> None:
    """Refuse to replace a pinned step, or the newest of a kind, by a step of fewer kinds.

    ``earlier`` is None for a step of another system, which counts as a checkpoint to resume from.

    Raises:
        SaveError: the step is the newest of a kind that the save does not serve as, or it is pinned
            or tagged.
    """
    if earlier is None:
        if "checkpoint" not in kinds:
            raise SaveError(
                f"{save} is not committed: it would replace the checkpoint of another system in "
                f"{save.folder}. Save a checkpoint of step {save.step} or another step first, or "
                "move that folder away."
            )
        return
    lost = earlier.list_lost(kinds)
    if lost and is_pinned(save.root, save.step):
        raise SaveError(
            f"{save} is not committed: it would replace the {lost[0]} of run {earlier.run}, which "
            f"is pinned or tagged. Save a checkpoint of step {save.step}, or remove the pin: "
            f"trinity-sync unpin {save.root} {save.step}"
        )
    for kind in lost:
        best = find_newest(save.root, kind)
        if best and best.step == save.step:
            raise SaveError(
                f"{save} is not committed: it would replace the newest {kind}, of run "
                f"{earlier.run}, with other weights, and nothing newer could be resumed from. Save "
                f"a checkpoint of step {save.step} or another step first, or go back on purpose: "
                f"trinity-sync rewind {save.root} STEP"
            )


def replace_step(
    save: SaveId,
    written: Sequence[Written],
    manifest: Manifest,
    earlier: Manifest | None,
    lock: LockFile,
    kept: Iterable[Path] = (),
    *,
    recycle: bool,
) -> None:
    """Replace the step in its folder by an exchange of folders, under the commit lock.

    It is an earlier run's commit or, without one, the step of another system, of whose files those
    ``kept`` stay: others have written them for this step. ``recycle`` keeps the files of the
    replaced step for block reuse.
    """
    fresh = step_folder(replacing_folder(save.root), save.step)
    if fresh.exists() or fresh.is_symlink():  # an earlier attempt died
        clear_replaced_step(save.root, save.step)
    make_folder(fresh)
    links = {file.record.path: Path(file.temporary) for file in written if file.temporary}
    # if the step is a symbolic link, the link is replaced, and its target stays
    elsewhere = [path.resolve() for path in links.values()] if save.folder.is_symlink() else []
    for record in manifest.files:  # what save functions wrote has its name already
        links.setdefault(record.path, save.folder / record.path)
    for path in kept:
        if not is_temporary(path.name):
            links.setdefault(path.relative_to(save.folder).as_posix(), path)
    for name, path in links.items():
        make_folder((fresh / name).parent)
        try:
            link_or_copy(path, fresh / name)
        except FileNotFoundError as error:
            missing = next((f for f in written if f.record.path == name), None)
            if missing is None:
                raise
            raise make_missing_file_error(missing, f"{save.folder}/{name}") from error
    sync_folders(fresh, links)
    require_named_files(save, fresh, manifest)
    write_manifest_into(fresh, manifest)
    for unfinished in _list_unfinished(save.folder):  # writers find the folders at any time
        make_folder((fresh / unfinished).parent)
    lock.require_held()
    swap_folders(fresh, save.folder)
    if not fresh.is_symlink():
        own = {image for file in written for image in file.record.images}
        names = _list_unfinished(fresh)
        _move_back([n for n in names if parse_image_name(n.name) not in own], fresh, save.folder)
    sync_folder(Path(save.root))
    for path in elsewhere:
        path.unlink(missing_ok=True)
    keep = manifest.nbytes if recycle else 0
    if place := clear_replaced_step(save.root, save.step, keep=keep):
        logger.warning(
            "%s replaced the step of %s, which is kept in %s",
            save,
            f"run {earlier.run}" if earlier else "another system, or of a save that was lost",
            place,
        )


def swap_folders(fresh: Path, current: Path) -> None:
    """Swap the names of two folders, atomically if the file system supports it.

    Otherwise ``current`` does not exist for a moment.
    """
    if exchange_names(fresh, current):
        return
    moved = fresh.with_name(f"{fresh.name}.replaced")
    move(current, moved)
    move(fresh, current)
    move(moved, fresh)


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Sync all folders from a step's parent down to its files, so that a power cut loses no name.

    ``names`` are the paths of the files below the step's folder.
    """
    below = {name.rpartition("/")[0] for name in names}
    above = {parent for name in below for parent in (Path(name), *Path(name).parents)}
    for each in {folder.parent, folder, *(folder / parent for parent in above)}:
        sync_folder(each)


def require_named_files(save: SaveId, folder: Path, manifest: Manifest) -> None:
    """Require that a manifest names files that are in the folder, and none of trinity_sync's own.

    Raises:
        SaveError: a file is missing, no regular one, has another size, or belongs to trinity_sync.
    """
    for record in manifest.files:
        path = f"{folder}/{record.path}"  # a Path per file would double the time
        if is_own_file(record.path):
            raise SaveError(
                f"{save} is not committed: it lists {path}, a name that trinity_sync uses itself. "
                "Save that file under another name."
            )
        try:
            found = os.lstat(path)
        except FileNotFoundError as error:
            raise SaveError(
                f"{save} is not committed: {path} is missing. Look for what removed it, and save "
                "the step again."
            ) from error
        if not S_ISREG(found.st_mode) or found.st_size != record.nbytes:
            raise SaveError(f"{path} changed before its commit; retry the save")


def make_missing_file_error(file: Written, final: str) -> SaveError:
    """Return the error for a written file that is missing; it names the node that wrote it."""
    where = f"which node {file.node} wrote, " if file.node else ""
    return SaveError(
        f"{final}, {where}is missing on the node of the commit. If each node has its own disk at "
        "the root, choose a root that all nodes share; otherwise something removed the file: retry "
        "the save."
    )


def clear_replaced_step(root: str | Path, step: int, *, keep: int = 0) -> Path | None:
    """Quarantine or remove the replaced step in `replacing_folder`. Call it under the commit lock.

    Return its path in quarantine; None if it was removed by `remove_folder`, which gets ``keep``.
    """
    folder = step_folder(replacing_folder(root), step)
    before, now = read_run_number(replacing_folder(root), step), read_run_number(root, step)
    parent: Path | None = None
    if 0 < before < now:
        if is_pinned(root, step):
            parent = quarantine_folder(root) / f"pinned-of-run-{before}"
        elif began := read_restart_time(root, before, now):
            parent = timed_folder(root, began)
    elif not before and list_files_of_run(root, folder, now) is not None:
        parent = timed_folder(root, read_start_time(root, now))
    if parent:
        while (place := step_folder(parent, step)).exists():  # of a run of the same second
            parent = parent.with_name(parent.name + "_")
        make_folder(parent)
        for path in walk_files(folder, f".*{TEMPORARY_SUFFIX}"):
            if is_temporary(path.name):  # of the replacing save
                remove_file(path)
        move(folder, place)
        sync_folder(parent)
        return place
    remove_folder(root, folder, keep=keep)
    return None


def displaced_folder(root: str | Path, step: int) -> Path:
    """Return the path of a step that made way for save functions; `gc.remove_replaced` knows it."""
    folder = step_folder(replacing_folder(root), step)
    return folder.with_name(f"{folder.name}.replaced")


def clear_displaced_step(root: str | Path, step: int, *, keep: int = 0) -> None:
    """Do as `clear_replaced_step` with the step in `displaced_folder`, if there is one."""
    moved = displaced_folder(root, step)
    if not moved.exists() and not moved.is_symlink():
        return
    folder = step_folder(replacing_folder(root), step)
    if folder.exists() or folder.is_symlink():
        clear_replaced_step(root, step)
    move(moved, folder)
    clear_replaced_step(root, step, keep=keep)


@contextmanager
def exclude_writes(save: SaveId, *, shared: bool = False) -> Iterator[None]:
    """Keep the commit of a save, and the functions that write for it, apart within the block.

    Functions share it, of superseded runs as well. A sync does not wait for a checkpoint's.

    Raises:
        LockTimeoutError: it has taken ten minutes.
        RootAwayError: as `require_root`.
    """
    end = len(SERVES_AS[save.kind])  # of a step's two bytes, the first is that of syncs
    how, start = (fcntl.F_RDLCK, end - 1) if shared else (fcntl.F_WRLCK, 0)
    path = Path(save.root) / PRIVATE_FOLDER / "functions.lock"
    require_root(save.root, save.job)
    with ExitStack() as held:
        try:
            lock = held.enter_context(open_lock_file(path))
        except OSError as error:
            if not shared or error.errno not in UNWRITABLE:
                raise
            yield  # nor can a function write there
            return
        lock.wait(lambda: lock.try_acquire_range(how, 2 * save.step + start, end - start), LIMIT_S)
        with suppress(OSError):  # for messages; the disk may be full
            if shared:
                os.pwrite(lock.fd, f"{describe_this_process()}\n".encode(), 0)
        yield


def displace_step(save: SaveId) -> None:
    """Move an earlier run's commit of a step away before a save function writes into its folder.

    A step of another system moves away as well. Its files never change. Once this run has committed
    the step it is removed or quarantined, as a step that is replaced. A step that a resume may need
    stays, and the function is refused.

    Raises:
        SaveError: the step is pinned, leased, the newest of a kind, or committed by this run.
        SupersededError: a later run has superseded or committed the step.
        FormatError: another release has committed it.
    """
    root, folder = Path(save.root), save.folder
    refuse_superseded(save.root, save.run, "", save.step)
    if _read_other(save) is None and list_files_of_run(root, folder, save.run) is None:
        return
    with acquire_commit_lock(root) as lock, acquire_removal_lock(root) as removal:
        earlier = _read_other(save)
        own = None if earlier else list_files_of_run(root, folder, save.run)
        if earlier is None and own is None:
            return  # another function was faster
        if earlier and earlier.run > save.run:
            raise SupersededError(
                f"{save} is superseded: run {earlier.run} has committed step {save.step}"
            )
        if earlier:
            _refuse_needed(save, earlier)
        refuse_loss(save, earlier, SERVES_AS[save.kind])
        clear_displaced_step(root, save.step)  # of a commit that died
        moved = displaced_folder(root, save.step)
        make_folder(moved.parent)
        for each in (lock, removal):
            each.require_held()
        move(folder, moved)
        sync_folder(moved.parent)
        sync_folder(root)
        for kind in earlier.kinds if earlier else ():
            repair_latest_pointer(root, kind)
        make_folder(folder)  # before that, a repair renames the step back
        if moved.is_symlink():
            return
        names = {path.relative_to(folder) for path in own or ()}
        _move_back({*names, *_list_unfinished(moved)}, moved, folder)


def _list_unfinished(folder: Path) -> list[Path]:
    """Return the files below a step's folder that saves are writing, relative to it."""
    found = walk_files(folder, f".*{TEMPORARY_SUFFIX}")
    return [path.relative_to(folder) for path in found if parse_image_name(path.name)]


def _move_back(names: Iterable[Path], moved: Path, folder: Path) -> None:
    """Move files of this run, which are written meanwhile, from where their step has moved to."""
    for name in names:
        make_folder((folder / name).parent)
        with suppress(FileNotFoundError):  # a save that failed has removed its own
            move(moved / name, folder / name)


def _read_other(save: SaveId) -> Manifest | None:
    """Return the manifest of a step that has files of another run; otherwise None.

    Raises:
        SaveError: this run has committed the save. A sync of images alone may get functions' files.
    """
    try:
        found = read_manifest(save.root, save.step)
    except ManifestError:
        return None  # it is not committed
    is_mine = found and found.run == save.run and found.has_kind(save.kind)
    if found and is_mine and (found.has_kind("checkpoint") or found.callables):
        raise SaveError(
            f"{save}: the save function is not run, because run {save.run} has committed that "
            "step, whose files never change. Save another step."
        )
    return found if found and (found.run != save.run or found.checkpoint_run) else None


def _refuse_needed(save: SaveId, earlier: Manifest) -> None:
    """Refuse to move a step that a reader holds, or that a resume would find.

    A run that resumed from a step before it has superseded it: that step is found instead.
    """
    begun = next((run.resumed_from for run in list_runs(save.root) if run.number == save.run), 0)
    newest = [find_newest(save.root, kind) for kind in earlier.kinds]
    base = read_step_state(save.root, begun)
    why = ""
    if is_pinned(save.root, save.step):
        why = "is pinned or tagged"
    elif any(lease.step == save.step for lease in list_leases(save.root)):
        why = "is being read"
    elif save.step <= begun:
        why = f"is not superseded, because run {save.run} resumed from step {begun}"
    elif any(found and found.step == save.step for found in newest) and (
        base.state != "valid" or base.manifest is None or earlier.list_lost(base.manifest.kinds)
    ):
        why = "is what a resume would find"
    if why:
        raise SaveError(
            f"{save}: the save function is not run, because it would write into step {save.step} "
            f"of run {earlier.checkpoint_run or earlier.run}, which is committed and {why}. Save "
            "another step, or move the folder away first."
        )
