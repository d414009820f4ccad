"""Displacement of a step that an earlier run committed, before a save function writes there.

A function computes the paths below ``root/global_step_{N}`` by itself, so the commit that readers
find there moves away as a whole: see "Save functions" in ``docs/contributing/design.md``.
"""

from pathlib import Path

from trinity_sync.errors import ManifestError, SaveError, SupersededError
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import SERVES_AS
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.discovery import find_newest, read_step_state
from trinity_sync.storage.latest_pointer import repair_latest_pointer
from trinity_sync.storage.leases import acquire_removal_lock, list_leases
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.manifest_files import is_own_file
from trinity_sync.storage.persist import parse_image_name
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.quarantine import clear_displaced_step, displaced_folder
from trinity_sync.storage.replace import refuse_loss
from trinity_sync.storage.runs import list_runs, refuse_superseded


def displace_step(save: SaveId) -> None:
    """Move an earlier run's commit of a step away before a save function writes into its folder.

    Its files never change. Once this run has committed the step it is removed or quarantined, as a
    step that is replaced. A step that a resume may need stays, and the function is refused.

    Raises:
        SaveError: the step is pinned, leased, or the newest of a kind.
        SupersededError: a later run has superseded or committed the step.
        FormatError: another release has committed it.
    """
    root, folder = Path(save.root), save.folder
    if _read_other(save) is None:
        return
    with acquire_commit_lock(root) as lock, acquire_removal_lock(root) as removal:
        earlier = _read_other(save)
        if earlier is None:
            return  # another function was faster
        refuse_superseded(save.root, save.run, "", save.step)
        if earlier.run > save.run:
            raise SupersededError(
                f"{save} is superseded: run {earlier.run} has committed step {save.step}"
            )
        _refuse_needed(save, earlier)
        refuse_loss(save, earlier, SERVES_AS[save.kind])
        clear_displaced_step(root, save.step)  # of a commit that died
        moved = displaced_folder(root, save.step)
        make_folder(moved.parent)
        for each in (lock, removal):
            each.require_held()
        folder.rename(moved)
        sync_folder(moved.parent)
        sync_folder(root)
        for kind in earlier.kinds:
            repair_latest_pointer(root, kind)
        make_folder(folder)  # before that, a repair renames the step back
        if moved.is_symlink():
            return
        official = {record.path for record in earlier.files}
        for path in list(moved.rglob("*")):  # other files are this run's, as in `replace_step`
            name = path.relative_to(moved).as_posix()
            own = is_own_file(name) and not parse_image_name(path.name)
            if name not in official and not own and path.is_file():
                make_folder((folder / name).parent)
                path.rename(folder / name)


def _read_other(save: SaveId) -> Manifest | None:
    """Return the manifest of a step that has files of another run; otherwise None."""
    try:
        found = read_manifest(save.root, save.step)
    except ManifestError:
        return None  # it is not committed
    return found if found and (found.run != save.run or found.checkpoint_run) else None


def _refuse_needed(save: SaveId, earlier: Manifest) -> None:
    """Refuse to move a step that a reader holds, or that a resume would find.

    A run that resumed from a step before it has superseded it: that step is found instead.
    """
    begun = next((run.resumed_from for run in list_runs(save.root) if run.number == save.run), 0)
    newest = [find_newest(save.root, kind) for kind in earlier.kinds]
    base = read_step_state(save.root, begun)
    why = ""
    if any(pin.step == save.step for pin in list_pins(save.root)):
        why = "is pinned or tagged"
    elif any(lease.step == save.step for lease in list_leases(save.root)):
        why = "is being read"
    elif save.step <= begun:
        why = f"is not superseded, because run {save.run} resumed from step {begun}"
    elif any(found and found.step == save.step for found in newest) and (
        base.state != "valid" or base.manifest is None or {*earlier.kinds} - {*base.manifest.kinds}
    ):
        why = "is what a resume would find"
    if why:
        raise SaveError(
            f"{save}: the save function is not run, because it would write into step {save.step} "
            f"of run {earlier.checkpoint_run or earlier.run}, which is committed and {why}. Save "
            "another step, or move the folder away first."
        )
