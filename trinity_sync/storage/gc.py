"""Garbage collection: remove or repair what crashes left on disk and in memory.

No step depends on it: a step is committed or not, whatever process dies. It keeps disks and memory
from filling up, and lets readers of latest pointers, which do not read manifests, find what was
committed. Each function may be called repeatedly, and while saves, readers and other calls of it
are running.
"""

import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trinity_sync.fs.atomic import (
    TEMPORARY_SUFFIX,
    is_temporary,
    list_paths,
    list_uncached,
    move,
    remove_tree,
    revalidate_folder,
    sync_folder,
    walk_files,
)
from trinity_sync.fs.locks import (
    TRASH_LOCK,
    acquire_commit_lock,
    has_no_other_users,
    try_acquire_file_lock,
)
from trinity_sync.layout import (
    ITERATION_FILES,
    KINDS,
    MANIFEST,
    PRIVATE_FOLDER,
    attaching_folder,
    step_folder,
    step_of_folder,
    steps_on_disk,
)
from trinity_sync.snapshot.spool import SLOT_SUFFIX, JobSpool
from trinity_sync.snapshot.ticket import hold_slot, ticket_path
from trinity_sync.storage.discovery import (
    find_newest,
    is_foreign,
    read_latest_pointer,
    read_step_state,
    repair_latest_pointer,
)
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.persist import parse_image_name
from trinity_sync.storage.replace import clear_replaced_step, fetching_folder, replacing_folder
from trinity_sync.storage.uncommitted import exports_folder, list_export_files, remove_export_files

IsFresh = Callable[[float], bool]
"""Returns whether what changed at a time, in seconds since the epoch, may still be in use."""


@dataclass(frozen=True)
class Finding:
    """A leftover or broken file that was found."""

    where: str
    """The job's root, or its folder in the spool."""
    what: str
    state: Literal["repaired", "left", "failed"]
    why: str
    """What was done, or why nothing was done."""


def repair_latest_pointers(root: Path) -> Iterator[Finding]:
    """Update the latest pointers to the newest steps that can be loaded."""
    if not (root / PRIVATE_FOLDER).is_dir():
        return  # no files of this project
    for kind in KINDS:
        name = ITERATION_FILES[kind]
        with acquire_commit_lock(root):
            moved = repair_latest_pointer(root, kind)
            named = read_latest_pointer(root, kind)
            wrong = ""
            if not (moved or named is None or is_foreign(step_folder(root, named))):
                wrong = read_step_state(root, named, runs=()).reason
        if moved:
            before = "nothing" if moved[0] is None else f"step {moved[0]}"
            yield Finding(str(root), name, "repaired", f"named {before}, names step {moved[1]} now")
        elif wrong:
            yield Finding(
                str(root), name, "left", f"names step {named}, and no other can be loaded: {wrong}"
            )


def remove_replaced(root: Path) -> Iterator[Finding]:
    """Remove leftovers of replaced steps; restore a step that lost its name meanwhile."""
    replacing, fetching = replacing_folder(root), fetching_folder(root)
    if not (replacing.is_dir() or fetching.is_dir()):
        return
    needed = []
    with acquire_commit_lock(root) as lock:  # a replacement holds it, so none is in flight
        revalidate_folder(root)  # another node may have died
        displaced = [*list_paths(replacing, "*.replaced"), *list_paths(fetching, "*.replaced")]
        for moved in displaced:
            current = root / moved.name.removesuffix(".replaced")
            if not current.exists():  # died between two renames, without an atomic exchange
                lock.require_held()
                move(moved, current)
                sync_folder(root)
                yield Finding(str(root), current.name, "repaired", "was renamed back")
            elif not _is_committed(current):
                needed.append(moved)
                name = moved.relative_to(root).as_posix()
                why = f"{current} is not committed; move it away to restore this step"
                yield Finding(str(root), name, "left", why)
            elif moved.parent == replacing and not (replacing / current.name).exists():
                move(moved, replacing / current.name)
        lock.require_held()
        for step in steps_on_disk(replacing):
            folder = step_folder(replacing, step)
            name = folder.relative_to(root).as_posix()
            kept = clear_replaced_step(root, step)
            if folder.exists():
                continue  # it is being read, as reported below
            why = f"quarantined in {kept.parent}" if kept else "removed"
            yield Finding(str(root), name, "repaired", f"left by a step that was replaced; {why}")
        rest = {*list_paths(replacing, "*"), *list_paths(fetching, "*.replaced")}.difference(needed)
        yield from _remove_paths(root, rest, "left by a step that was replaced")


def empty_trash(root: Path) -> Iterator[Finding]:
    """Remove the folders that an interrupted removal renamed into the trash."""
    trash = root / PRIVATE_FOLDER / "trash"
    if not trash.is_dir():
        return
    with try_acquire_file_lock(trash.parent / TRASH_LOCK) as acquired:
        if not acquired:
            return  # another process removes them
        yield from _remove_paths(root, list_paths(trash, "*"), "left by an interrupted removal")


def remove_exports(root: Path, *, is_fresh: IsFresh) -> Iterator[Finding]:
    """Remove leftovers of exports whose steps are removed, unless they are fresh."""
    names = (path.name.partition(".") for path in list_uncached(exports_folder(root), "*"))
    steps = {step_of_folder(name) for name, dot, _ in names if dot}.difference(steps_on_disk(root))
    for step in sorted(step for step in steps if step is not None):
        with suppress(FileNotFoundError):  # retention removes them meanwhile
            left = list_export_files(root, step)
            if not left or any(is_fresh(path.lstat().st_mtime) for path in left):
                continue
            remove_export_files(root, step)
            yield Finding(
                str(root), f"exports of step {step}", "repaired", "the step is gone; removed"
            )


def remove_temporaries(
    root: Path, *, images: Container[str], busy: Container[int] | None, is_fresh: IsFresh
) -> Iterator[Finding]:
    """Remove temporary files of this project that no process will rename.

    A temporary file in a step belongs to the save that writes it: a retry writes it again from
    the image. A temporary file next to latest pointers, run records and the like is renamed a
    moment later, unless its process died.

    Files of ``images``, the names of those in the spool, are kept without a finding, and so are
    fresh files. ``busy`` are the steps of pending flow runs; None if they are unknown, which keeps
    the files of all steps.
    """
    pattern, steps = f".*{TEMPORARY_SUFFIX}", steps_on_disk(root)
    found = [
        (step, path) for step in steps for path in walk_files(step_folder(root, step), pattern)
    ]
    for step, path in [(step, path) for step, path in found if _is_temporary(path)]:
        image = parse_image_name(path.name)
        with suppress(FileNotFoundError):
            if is_fresh(path.lstat().st_ctime) or image in images:  # also what got a name since
                continue
            name = path.relative_to(root).as_posix()
            if busy is None:
                why = "it is not known here whether a save in flight writes it"
                yield Finding(str(root), name, "left", why)
            elif step not in busy:
                remove_tree(path)
                yield Finding(str(root), name, "repaired", "written by a save that died; removed")
    private = root / PRIVATE_FOLDER
    for folder in (root, private, *filter(Path.is_dir, list_paths(private, "*"))):
        for path in filter(_is_temporary, list_paths(folder, f".*{TEMPORARY_SUFFIX}")):
            with suppress(FileNotFoundError):  # it has been renamed
                if not is_fresh(path.lstat().st_mtime):
                    remove_tree(path)
                    name = path.relative_to(root).as_posix()
                    why = "written by a process that died; removed"
                    yield Finding(str(root), name, "repaired", why)


def remove_attached(
    root: Path, *, waiting: Container[int] | None, is_fresh: IsFresh
) -> Iterator[Finding]:
    """Remove files that other code wrote for saves that were not submitted, or have failed.

    Those of ``waiting`` steps, which have a pending flow run or an image on this node, are kept;
    None if they are unknown, which keeps all. So are those that are fresh, or changed after the
    newest commit.
    """
    found = list_paths(attaching_folder(root), "*/global_step_*")
    newest = find_newest(root) if found else None
    if waiting is None or newest is None:
        return
    with suppress(FileNotFoundError):  # a commit removes them meanwhile
        before = (step_folder(root, newest.step) / MANIFEST).stat().st_mtime
        for folder in found:
            changed_at, step = folder.stat().st_mtime, step_of_folder(folder.name)
            if changed_at < before and not is_fresh(changed_at) and step not in waiting:
                why = "written for a save that was not committed"
                yield from _remove_paths(root, [folder.parent], why)


def remove_dead_spool(job: JobSpool, *, is_fresh: IsFresh) -> Iterator[Finding]:
    """Remove a job's folder in the spool if its root is gone and no process uses it now."""
    root, where = job.read_root(), str(job.folder)
    if root is None or root.is_dir():
        return
    what = f"{job.folder.name}, whose root {root} is gone"
    sealed, unreadable = job.tickets()
    if sealed or unreadable or list_paths(job.receipts, "*"):
        why = f"it has {len(sealed)} unsaved images; mount or restore the root, or remove {where}"
        yield Finding(where, what, "left", "; ".join([why, *map(str, unreadable)]))
        return
    with suppress(FileNotFoundError):
        slots = list_paths(job.folder, f"*{SLOT_SUFFIX}")
        if any(is_fresh(path.lstat().st_mtime) for path in (job.folder, *slots)):
            return
        with _lock_unused_slots(slots) as unused:
            if not unused:
                yield Finding(where, what, "left", "a process has it open")
                return
            nbytes = sum(slot.stat().st_blocks * 512 for slot in slots)
            shutil.rmtree(job.folder)
        yield Finding(where, what, "repaired", f"removed; {nbytes:,} bytes of memory freed")


@contextmanager
def _lock_unused_slots(slots: list[Path]) -> Iterator[bool]:
    """Lock the slots; yield whether all are free and no other process has any open."""
    with ExitStack() as locks:
        unused = all(map(has_no_other_users, slots))
        for slot in slots if unused else ():
            locks.enter_context(hold_slot(slot))
        yield unused and not any(ticket_path(slot).exists() for slot in slots)


def _is_committed(folder: Path) -> bool:
    step = step_of_folder(folder.name)
    return step is not None and read_run_number(folder.parent, step) > 0


def _remove_paths(root: Path, paths: Iterable[Path], why: str) -> Iterator[Finding]:
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if not remove_tree(path):
            yield Finding(str(root), name, "left", f"{why}; a process on this node reads it")
            continue
        yield Finding(str(root), name, "repaired", f"{why}; removed")


def _is_temporary(path: Path) -> bool:
    return is_temporary(path.name) and path.is_file() and not path.is_symlink()


FILE_REPAIRS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    remove_replaced,
    repair_latest_pointers,
    empty_trash,
)
"""Quick repairs that need no server, in the order in which each enables the next."""
