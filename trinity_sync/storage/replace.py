"""A step takes the place of an earlier run's commit of the same step, in one exchange of folders.

No commit may lose the newest step of a kind: a sync either leaves a checkpoint with the same
weights as it is, or is refused.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from trinity_sync.errors import (
    FormatError,
    LockTimeoutError,
    SaveError,
)
from trinity_sync.fs.atomic import (
    REMOVED_PREFIX,
    TEMPORARY_SUFFIX,
    exchange,
    link_or_copy,
    make_folder,
    sync_folder,
)
from trinity_sync.fs.locks import LockFile
from trinity_sync.layout import (
    CORRUPTION_MARK,
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    step_folder,
)
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.discovery import manifest_state, newest
from trinity_sync.storage.export_requests import inherit_export_requests
from trinity_sync.storage.manifest import (
    Manifest,
    write_manifest_into,
)
from trinity_sync.storage.metrics import copy_metrics
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.quarantine import clear_replaced, replacing_folder
from trinity_sync.storage.save import Written

logger = logging.getLogger(__name__)


def is_covered_by(save: SaveId, earlier: Manifest, manifest: Manifest) -> bool:
    """Whether a sync adds nothing to an earlier run's checkpoint of the step, which then stays.

    So it is where a run begins with a sync of the step that it has loaded.

    Args:
        save: the sync.
        earlier: manifest of the checkpoint.
        manifest: of the sync.
    """
    if {*earlier.kinds} <= {*manifest.kinds}:
        return False
    held = {record.path: record.digest for record in earlier.files}
    return manifest_state(save.root, earlier, runs=()).state == "valid" and all(
        held.get(record.path) == record.digest for record in manifest.files
    )


def inherit_exports_and_metrics(save: SaveId, earlier: Manifest) -> None:
    """Have a run inherit the export requests and metrics of a checkpoint that stays.

    Args:
        save: of the later run.
        earlier: manifest of the checkpoint.
    """
    inherit_export_requests(save.root, save.step, earlier.run, save.run)
    try:
        copy_metrics(save.root, save.step, earlier.run, save.run)
    except (FormatError, LockTimeoutError) as error:
        logger.warning("the metrics of step %d do not count for %s: %s", save.step, save, error)


def refuse_loss(save: SaveId, earlier: Manifest, manifest: Manifest) -> None:
    """See that a step may be replaced by one that serves as fewer kinds.

    Raises:
        SaveError: it is the newest of a kind that the save does not serve as, or it is pinned or
            tagged.
    """
    lost = sorted({*earlier.kinds} - {*manifest.kinds})
    if lost and any(pin.step == save.step for pin in list_pins(save.root)):
        raise SaveError(
            f"{save} is not committed: it would replace the {lost[0]} of run {earlier.run}, which "
            f"is pinned or tagged. Save a checkpoint of step {save.step}, or remove the pin: "
            f"trinity-sync unpin {save.root} {save.step}"
        )
    for kind in lost:
        best = newest(save.root, kind)
        if best and best.step == save.step:
            raise SaveError(
                f"{save} is not committed: it would replace the newest {kind}, of run "
                f"{earlier.run}, with other weights, and nothing newer could be resumed from. Save "
                f"a checkpoint of step {save.step} or another step first, or go back on purpose: "
                f"trinity-sync rewind {save.root} --to STEP"
            )


def replace_step(
    save: SaveId,
    written: Sequence[Written],
    manifest: Manifest,
    earlier: Manifest,
    lock: LockFile,
    *,
    recycle: bool,
) -> None:
    """Take the place of an earlier run's commit of the same step, in one exchange of folders.

    Files that the earlier commit does not name (a dataloader's, say) move along.
    """
    fresh = step_folder(replacing_folder(save.root), save.step)
    if fresh.exists() or fresh.is_symlink():  # an earlier attempt died
        clear_replaced(save.root, save.step)
    make_folder(fresh)
    links = {file.record.path: Path(file.temporary) for file in written if file.temporary}
    # a step that is somebody's link gives way with the link, and what it leads to stays
    elsewhere = [path.resolve() for path in links.values()] if save.folder.is_symlink() else []
    official = {record.path for record in earlier.files} | {
        MANIFEST,
        FULL_CHECKPOINT_MARK,
        CORRUPTION_MARK,
    }
    official -= {name for receipt in manifest.receipts for name in receipt.files}
    for path in save.folder.rglob("*"):
        name = path.relative_to(save.folder).as_posix()
        passing = path.suffix == TEMPORARY_SUFFIX or path.name.startswith(REMOVED_PREFIX)
        if path.is_file() and name not in official and not passing:
            links.setdefault(name, path)
    for name, path in links.items():
        make_folder((fresh / name).parent)
        try:
            link_or_copy(path, fresh / name)
        except FileNotFoundError as error:
            missing = next((f for f in written if f.record.path == name), None)
            if missing is None:
                raise
            raise vanished_error(missing, f"{save.folder}/{name}") from error
    sync_folders(fresh, links)
    write_manifest_into(fresh, manifest)
    lock.require_ours()
    exchange_folders(fresh, save.folder)
    sync_folder(Path(save.root))
    for path in elsewhere:
        path.unlink(missing_ok=True)
    keep = manifest.nbytes if recycle else 0
    if kept := clear_replaced(save.root, save.step, keep=keep):
        logger.warning(
            "%s replaces that of run %d, which is kept in %s, since run %d had begun at step 0",
            save,
            earlier.run,
            kept,
            save.run,
        )


def exchange_folders(fresh: Path, current: Path) -> None:
    """Swap two folders; where the file system cannot, there is a moment without ``current``."""
    if exchange(fresh, current):
        return
    moved = fresh.with_name(f"{fresh.name}.replaced")
    current.rename(moved)
    fresh.rename(current)
    moved.rename(fresh)


def sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Make files below the folder findable after a power cut, whoever made the folders above."""
    below = {name.rpartition("/")[0] for name in names}
    above = {parent for name in below for parent in (Path(name), *Path(name).parents)}
    for each in {folder.parent, folder, *(folder / parent for parent in above)}:
        sync_folder(each)


def vanished_error(file: Written, final: str) -> SaveError:
    """Return the error for a written file that is gone; it says which node wrote it.

    Args:
        file: the written one.
        final: path that it was to have.
    """
    where = f"which node {file.node} wrote, " if file.node else ""
    return SaveError(
        f"{final}, {where}is not in the root as the node of the commit sees it. If the root is a "
        "disk of each node's own, take one that all nodes see; else something removed the file: "
        "retry the flow run."
    )
