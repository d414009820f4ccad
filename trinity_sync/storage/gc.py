"""What a crash leaves behind on disk and in memory, and what may be done about it at any time.

Nothing here is needed for a step to be safe: a commit is whole or it is not one, whatever dies. It
is needed so that disks and memory do not fill, and so that who reads an iteration file, and not
the manifests, finds what was committed. Each function may be called while saves, readers and other
calls of it are at work, and again and again.
"""

import math
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trinity_sync.errors import CommitError, FormatError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, revalidate_folder, sync_folder
from trinity_sync.fs.file_lease import is_ours_alone
from trinity_sync.fs.locks import TRASH_LOCK, file_lock_if_free, one_change_at_a_time
from trinity_sync.layout import (
    ITERATION_FILES,
    KINDS,
    PRIVATE_FOLDER,
    step_folder,
    steps_on_disk,
)
from trinity_sync.snapshot.slot_lock import hold_slot
from trinity_sync.snapshot.spool import SLOT_SUFFIX, JobSpool
from trinity_sync.snapshot.ticket import ticket_path
from trinity_sync.storage.block_reuse import remove_tree
from trinity_sync.storage.discovery import is_foreign, require_committed
from trinity_sync.storage.export_requests import exported_steps, exports_of, remove_export_files
from trinity_sync.storage.latest_pointer import read_iteration, repair_latest_pointer
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.persist import image_of_temporary
from trinity_sync.storage.quarantine import (
    clear_replaced,
    fetching_folder,
    replacing_folder,
)

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}" + re.escape(TEMPORARY_SUFFIX))


@dataclass(frozen=True)
class Finding:
    """One thing that was not as it should be."""

    where: str
    """The job's root, or its folder in the spool."""
    what: str
    state: Literal["mended", "left"]
    why: str
    """What was done, or why nothing was."""


def repair_latest_pointers(root: Path) -> Iterator[Finding]:
    """Have the iteration files name the newest steps that can be loaded."""
    if not (root / PRIVATE_FOLDER).is_dir():
        return  # nothing of ours
    for kind in KINDS:
        name = ITERATION_FILES[kind]
        with one_change_at_a_time(root):
            moved = repair_latest_pointer(root, kind)
            named = read_iteration(root, kind)
            wrong = None if moved or named is None else _why_not(root, named)
        if moved:
            before = "nothing" if moved[0] is None else f"step {moved[0]}"
            yield Finding(str(root), name, "mended", f"named {before}, names step {moved[1]} now")
        elif wrong:
            yield Finding(
                str(root), name, "left", f"names step {named}, and no other can be loaded: {wrong}"
            )


def remove_replaced(root: Path) -> Iterator[Finding]:
    """Remove what the replacing of a step has left; put back a step that has lost its name."""
    replacing, fetching = replacing_folder(root), fetching_folder(root)
    if not (replacing.is_dir() or fetching.is_dir()):
        return
    needed = []
    with one_change_at_a_time(root) as lock:  # who replaces a step holds it, so these are nobody's
        revalidate_folder(root)  # it may have been another node that died
        for moved in [*replacing.glob("*.replaced"), *fetching.glob("*.replaced")]:
            current = root / moved.name.removesuffix(".replaced")
            if not current.exists():  # died between two renames, where there is no exchange
                lock.require_ours()
                moved.rename(current)
                sync_folder(root)
                yield Finding(str(root), current.name, "mended", "was put back in its place")
            elif not _is_committed(current):
                needed.append(moved)
                name = moved.relative_to(root).as_posix()
                why = f"what is in its place is not committed; move {current} away to have it back"
                yield Finding(str(root), name, "left", why)
        lock.require_ours()
        for step in steps_on_disk(replacing):
            folder = step_folder(replacing, step)
            name = folder.relative_to(root).as_posix()
            try:
                kept = clear_replaced(root, step)
            except FormatError as error:
                needed.append(folder)
                yield Finding(str(root), name, "left", str(error))
                continue
            if folder.exists():
                continue  # it is read, as is said below
            why = f"quarantined in {kept.parent}" if kept else "removed"
            yield Finding(str(root), name, "mended", f"left by a step that was replaced; {why}")
        rest = {*replacing.glob("*"), *fetching.glob("*.replaced")}.difference(needed)
        yield from _removed(root, rest, "left by a step that was replaced")


def empty_trash(root: Path) -> Iterator[Finding]:
    """Remove folders that have lost their names in a removal that was broken off."""
    trash = root / PRIVATE_FOLDER / "trash"
    if not trash.is_dir():
        return
    with file_lock_if_free(trash.parent / TRASH_LOCK) as ours:
        if not ours:
            return  # somebody is removing them just now
        yield from _removed(root, trash.iterdir(), "left by a removal that was broken off")


def remove_exports(root: Path, *, before: float) -> Iterator[Finding]:
    """Remove what exports have left of steps that are gone, unless it changed after ``before``."""
    for step in sorted(exported_steps(root).difference(steps_on_disk(root))):
        with suppress(FileNotFoundError):  # a retention removes them just now
            changed = (path.lstat().st_mtime for path in exports_of(root, step))
            if max(changed, default=math.inf) >= before:
                continue
            remove_export_files(root, step)
            yield Finding(
                str(root), f"exports of step {step}", "mended", "the step is gone; removed"
            )


def remove_temporaries(
    root: Path, *, images: Container[str], busy: Container[int] | None, before: float
) -> Iterator[Finding]:
    """Remove temporary files that nobody will give a name any more, by the names that we give.

    One in a step is of use to the flow run that writes it, and to no other: a retry writes it again
    from the image. One beside iteration files, run records and the like had its final name a moment
    later, or its process died.

    Args:
        root: the job's folder.
        images: that still wait in the spool; files of theirs are left, and not worth a word.
        busy: steps that a flow run is at or will be; None if that cannot be told, which leaves all.
        before: files that changed after it (seconds since the epoch) are left.
    """
    folders = {step: step_folder(root, step) for step in steps_on_disk(root)}
    found = [(step, path) for step, folder in folders.items() for path in _temporaries(folder)]
    for step, path in found:
        image = image_of_temporary(path.name)
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime >= before or image in images:
                continue
            name = path.relative_to(root).as_posix()
            if busy is None:
                why = "the Prefect server cannot be asked whether a run writes it"
                yield Finding(str(root), name, "left", why)
            elif step not in busy:
                path.unlink()
                yield Finding(str(root), name, "mended", "a save that died wrote it; removed")
    private = root / PRIVATE_FOLDER
    for folder in (root, private, *(path for path in private.glob("*") if path.is_dir())):
        for path in filter(_is_temporary, folder.glob(f".*{TEMPORARY_SUFFIX}")):
            with suppress(FileNotFoundError):  # it has its name by now
                if path.lstat().st_mtime < before:
                    path.unlink()
                    name = path.relative_to(root).as_posix()
                    why = "a process that died wrote it; removed"
                    yield Finding(str(root), name, "mended", why)


def remove_dead_spool(job: JobSpool, *, before: float) -> Iterator[Finding]:
    """Remove a job's folder in memory if its root is gone and nobody uses the folder.

    Args:
        job: the job's folder on this node.
        before: a folder in which something changed after it (seconds since the epoch) is left.
    """
    root, where = job.root, str(job.folder)
    if root is None or root.is_dir():
        return
    what = f"{job.folder.name}, whose root {root} is gone"
    sealed, unreadable = job.tickets()
    if sealed or unreadable:
        why = f"{len(sealed)} images wait in it; make the root again, or remove {where}"
        yield Finding(where, what, "left", "; ".join([why, *map(str, unreadable)]))
        return
    with suppress(FileNotFoundError):
        slots = list(job.folder.glob(f"*{SLOT_SUFFIX}"))
        if any(path.lstat().st_mtime >= before for path in (job.folder, *slots)):
            return
        with _all_alone(slots) as alone:
            if not alone:
                yield Finding(where, what, "left", "a process still has it open")
                return
            nbytes = sum(slot.stat().st_blocks * 512 for slot in slots)
            shutil.rmtree(job.folder)
        yield Finding(where, what, "mended", f"removed, {nbytes:,} bytes of memory are free again")


@contextmanager
def _all_alone(slots: list[Path]) -> Iterator[bool]:
    """Whether no other process has one of the slots open, and all of them are free."""
    if not all(is_ours_alone(slot) for slot in slots):
        yield False
        return
    if not slots:
        yield True
        return
    with hold_slot(slots[0]), _all_alone(slots[1:]) as alone:
        yield alone and not ticket_path(slots[0]).exists()


def _is_committed(folder: Path) -> bool:
    root = folder.parent
    return any(
        folder == step_folder(root, step) and read_run_number(root, step)
        for step in steps_on_disk(root)
    )


def _removed(root: Path, paths: Iterable[Path], why: str) -> Iterator[Finding]:
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif not remove_tree(path):
            yield Finding(str(root), name, "left", f"{why}; a process of this node reads it")
            continue
        yield Finding(str(root), name, "mended", f"{why}; removed")


def _temporaries(folder: Path) -> Iterator[Path]:
    return filter(_is_temporary, folder.rglob(f".*{TEMPORARY_SUFFIX}"))


def _is_temporary(path: Path) -> bool:
    ours = _TEMPORARY.fullmatch(path.name)
    return bool(ours) and path.is_file() and not path.is_symlink()


def _why_not(root: Path, step: int) -> str | None:
    if is_foreign(step_folder(root, step)):
        return None
    try:
        require_committed(root, step)
    except (CommitError, FormatError) as error:
        return str(error)
    return None


FILE_REPAIRS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    remove_replaced,
    repair_latest_pointers,
    empty_trash,
)
"""What asks nobody, and is quick: in the order in which one makes the next possible."""
