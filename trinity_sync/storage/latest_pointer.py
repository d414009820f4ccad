"""Latest pointers: ``latest_*_iteration.txt``, from which veRL and Trinity resume and sync.

They are updated after the manifest, atomically, and only forward: by step within a run, and a later
run counts as newer than every earlier run, because it resumed from an earlier step on purpose. A
step of another system, which has no manifest, belongs to the run in which the pointer was written.
A pointer moves back only from a corrupted step (`repair_latest_pointer`).
"""

import logging
from collections.abc import Collection
from pathlib import Path

from trinity_sync.fs.atomic import read_uncached, replace_file, sync_folder
from trinity_sync.layout import ITERATION_FILES, Kind, parse_number, step_folder
from trinity_sync.storage.discovery import find_newest, is_foreign, read_corruption
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.runs import run_began_after

logger = logging.getLogger(__name__)


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


def advance_latest_pointer(root: str | Path, kind: Kind, run: int, step: int) -> None:
    """Update a latest pointer to a committed step that is valid, unless it names a newer step."""
    path = Path(root) / ITERATION_FILES[kind]
    if corruption := read_corruption(root, step):
        logger.error(
            "Not updating the latest pointer to step %d in %s: the step is corrupted (%s)",
            step,
            root,
            corruption,
        )
        return
    if read_latest_pointer(root, kind) is None:
        if path.exists():
            logger.warning("latest pointer %s was empty or torn; writing it again", path)
    elif latest_pointer_covers(root, kind, run, step):
        return
    replace_file(path, str(step))


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

    Raises:
        FormatError: another release has committed a step, or has begun a run.
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


def latest_pointer_covers(root: str | Path, kind: Kind, run: int, step: int) -> bool:
    """Return whether a latest pointer names a step of a run, or a step that counts as newer."""
    current = read_latest_pointer(root, kind)
    if current is None:
        return False
    if is_foreign(step_folder(root, current)):
        return current >= step and not run_began_after(
            root, run, Path(root) / ITERATION_FILES[kind]
        )
    return (read_run_number(root, current), current) >= (run, step)
