"""Iteration files: the pointers that veRL and Trinity resume and sync from.

They move after the manifest, atomically, and only forward: by step within a run, while a later run
counts as newer than every earlier one, because it went on from an earlier step on purpose. A step
that another system has saved, which has no manifest, belongs to the run in which the pointer was
written. The one way back is from a step that turned out to be corrupted (`repair_latest_pointer`).
A pointer to a step of another release stays, since this one cannot read the step.
"""

import logging
from pathlib import Path

from trinity_sync.errors import CommitError, FormatError, SupersededError
from trinity_sync.fs.atomic import read_uncached, replace_file
from trinity_sync.layout import ITERATION_FILES, Kind, parse_number, step_folder
from trinity_sync.storage.corruption import read_corruption
from trinity_sync.storage.discovery import is_foreign, newest_first, require_committed
from trinity_sync.storage.manifest import Manifest, read_run_number
from trinity_sync.storage.runs import refuse_superseded, run_began_after

logger = logging.getLogger(__name__)


def read_iteration(root: str | Path, kind: Kind) -> int | None:
    """The step that the iteration file names; None if it is missing, empty or torn."""
    try:
        text = read_uncached(Path(root) / ITERATION_FILES[kind]).decode().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return parse_number(text)


def advance_latest_pointer(root: str | Path, kind: Kind, run: int, step: int) -> bool:
    """Update a latest pointer to a committed step, unless it names a newer one already.

    Args:
        root: the job's root.
        kind: of the pointer.
        run: that committed the step.
        step: a committed one.

    Returns:
        Whether the file names ``step`` now.
    """
    path = Path(root) / ITERATION_FILES[kind]
    current = read_iteration(root, kind)
    if corruption := read_corruption(root, step):
        logger.error(
            "Not updating the latest pointer to step %d in %s: the step is corrupted (%s)",
            step,
            root,
            corruption,
        )
        return False
    if current is None:
        if path.exists():
            logger.warning("iteration file %s was empty or torn and is written again", path)
    elif latest_pointer_covers(root, kind, run, step):
        return current == step
    replace_file(path, str(step))
    return True


def repair_latest_pointer(root: str | Path, kind: Kind) -> tuple[int | None, int] | None:
    """Update a latest pointer to the newest step that can be loaded; its one way back.

    It goes back from a step that is corrupted or gone, and forward where a commit died before it
    had moved it. A step that another system has saved, which has no manifest, is left alone. Where
    no step can be loaded the file stays as it is: a resume then stops with an error, rather than
    begin at zero without a word. Call it under the commit lock.

    Returns:
        The steps that the file named before and after; None if it stayed as it was.
    """
    current = read_iteration(root, kind)
    best = _best(root, kind)
    if best is None or (current is not None and _stays(root, kind, current, best)):
        return None
    replace_file(Path(root) / ITERATION_FILES[kind], str(best.step))
    logger.warning(
        "%s in %s names step %d now, not %s", ITERATION_FILES[kind], root, best.step, current
    )
    return current, best.step


def latest_pointer_covers(root: str | Path, kind: Kind, run: int, step: int) -> bool:
    """Whether the iteration file names this step, or one that counts as newer."""
    current = read_iteration(root, kind)
    if current is None:
        return False
    if is_foreign(step_folder(root, current)):
        return current >= step and not run_began_after(
            root, run, Path(root) / ITERATION_FILES[kind]
        )
    return (read_run_number(root, current), current) >= (run, step)


def _best(root: str | Path, kind: Kind) -> Manifest | None:
    """The newest step that may be pointed at: valid, and not superseded by a later run.

    None also where another release has committed something newer, or begun a run.
    """
    try:
        for manifest in newest_first(root, kind):
            try:
                refuse_superseded(root, manifest.run, "", manifest.step)
                return require_committed(root, manifest.step)
            except (SupersededError, CommitError):
                continue
    except FormatError as error:
        logger.warning("%s in %s stays as it is: %s", ITERATION_FILES[kind], root, error)
    return None


def _stays(root: str | Path, kind: Kind, current: int, best: Manifest) -> bool:
    if is_foreign(step_folder(root, current)):
        return True
    try:
        found = require_committed(root, current)
    except (CommitError, FormatError):  # the best is newer than any step of another release
        return False
    return kind in found.kinds and (found.run, found.step) >= (best.run, best.step)
