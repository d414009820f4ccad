"""Capability probe of the file system of a root, when a job begins.

A commit is made of a few operations of the file system, and is worth as much as these. Types,
versions and mount options say little about them, so each operation is tried in the root: it takes
some milliseconds (two syncs of the disk) and leaves nothing behind. Only mounts of object stores go
by their names: their renames look atomic, and are copies. A root without what a commit requires is
refused before the training begins; what only makes a commit faster is done another way.

Whether locks and files reach other nodes cannot be probed from one of them: see `client.init_root`.
"""

import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import RootError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, exchange_names, sync_folder
from trinity_sync.fs.direct_io import ALIGNMENT
from trinity_sync.fs.file_lease import has_no_other_users
from trinity_sync.fs.locks import file_lock, file_lock_if_free
from trinity_sync.fs.mounts import Mount, find_mount

PROBES = ("probe", "meeting", "doctor")
"""What probes put into a root for a moment: ``.probe.*.tmp``, a folder, and files likewise."""
_LEFT_S = 3600.0
"""Age in seconds from which it is what a killed process left."""


@dataclass(frozen=True)
class Capability:
    """An operation, and whether the file system has it."""

    name: str
    required: bool
    """Whether a commit cannot do without it."""
    reason: str
    """Why the file system does not have it; empty if it has."""
    consequence: str
    """What is done, or cannot be promised, without it."""


@dataclass(frozen=True)
class Capabilities:
    """The result of a probe of a root."""

    root: Path
    mount: Mount
    each: tuple[Capability, ...]

    def has(self, name: str) -> bool:
        """Return whether the file system has an operation, by its name."""
        return any(each.name == name and not each.reason for each in self.each)


def require_capabilities(root: Path) -> Capabilities:
    """Probe a root, which needs what a commit requires.

    Raises:
        RootError: it cannot be written, or lacks something that a commit requires.
    """
    found = probe_capabilities(root)
    if lacking := [each for each in found.each if each.required and each.reason]:
        raise RootError(
            f"{root} cannot be the root of a job. Its file system ({found.mount}) has no "
            + "; no ".join(f"{a.name} ({a.reason}), so {a.consequence}" for a in lacking)
            + ". Take a folder on a local disk, or on a shared file system with POSIX semantics; "
            "for an object store, name it in TRINITY_SYNC_REMOTE and keep the root on a disk."
        )
    return found


def probe_capabilities(root: Path) -> Capabilities:
    """Probe a root, which is left as it was.

    Raises:
        RootError: nothing can be written there.
    """
    folder = root / f".probe.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        folder.mkdir()
        _remove_leftovers(root, now=folder.stat().st_mtime)
        each = tuple(
            Capability(name, required, _failure_of(attempt, folder), without)
            for name, required, attempt, without in _ATTEMPTS
        )
    except OSError as error:
        todo = "Change its owner or mode, mount it for writing"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "Make room there"
        raise RootError(
            f"{root} ({find_mount(root)}) cannot be written: {error.strerror}. {todo}, or take "
            "another root."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Capabilities(root, find_mount(root), each)


class _Unsupported(Exception):
    """The operation did something, but not what it is for."""


def _failure_of(attempt: Callable[[Path], None], folder: Path) -> str:
    own = folder / attempt.__name__
    try:
        own.mkdir()
        attempt(own)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return error.strerror or type(error).__name__
    except _Unsupported as error:
        return str(error)
    return ""


def _exclusive(folder: Path) -> None:
    (folder / "one").touch(exist_ok=False)
    try:
        (folder / "one").touch(exist_ok=False)
    except FileExistsError:
        return
    raise _Unsupported("a file was made twice")


def _synced(folder: Path) -> None:
    with (folder / "file").open("xb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _replaced(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    before = new.stat()
    new.replace(old)
    after = old.stat()
    if old.read_bytes() != b"new" or new.exists():
        raise _Unsupported("the old file was still there, or the new one twice")
    if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise _Unsupported("the file is another one afterwards: a copy")


def _moved(folder: Path) -> None:
    if (mount := find_mount(folder)).is_object_store:
        raise _Unsupported(f"{mount.kind} copies the files of a folder, one after the other")
    (folder / "old/below").mkdir(parents=True)
    (folder / "old/below/file").write_bytes(b"x")
    (folder / "old").rename(folder / "new")
    if (folder / "new/below/file").read_bytes() != b"x" or (folder / "old").exists():
        raise _Unsupported("it did not arrive whole")


def _locked(folder: Path) -> None:
    for shared in (True, False):
        with (
            file_lock(folder / "lock", shared=shared),
            file_lock_if_free(folder / "lock") as both,
        ):
            if both:
                raise _Unsupported("two had the same lock at once")


def _exchanged(folder: Path) -> None:
    for name in ("one", "other"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    if not exchange_names(folder / "one", folder / "other"):
        raise _Unsupported("not supported")
    if not (folder / "one/other").exists():
        raise _Unsupported("nothing was exchanged")


def _linked(folder: Path) -> None:
    (folder / "one").touch()
    os.link(folder / "one", folder / "other")


def _direct(folder: Path) -> None:
    fd = os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.pwrite(fd, mmap.mmap(-1, ALIGNMENT), 0)  # at a page boundary
    finally:
        os.close(fd)


def _leased(folder: Path) -> None:
    (folder / "file").touch()
    if not has_no_other_users(folder / "file"):
        raise _Unsupported("the kernel gives no lease")


_ATTEMPTS: tuple[tuple[str, bool, Callable[[Path], None], str], ...] = (
    ("exclusive create", True, _exclusive, "two runs could get the same number"),
    ("sync to disk", True, _synced, "a committed step could be gone after a power cut"),
    ("atomic rename of a file", True, _replaced, "a manifest or a pointer could be seen torn"),
    ("atomic rename of a folder", True, _moved, "a step could be seen half removed"),
    ("locks between processes", True, _locked, "two commits or removals could cross"),
    (
        "hard links",
        False,
        _linked,
        "files are copied where a later run commits a step again",
    ),
    (
        "exchange of folders",
        False,
        _exchanged,
        "there is a moment without a step that a later run commits again",
    ),
    ("direct I/O", False, _direct, "files go through the page cache"),
    ("leases", False, _leased, "files of removed steps are not written over (recycled)"),
)


def _remove_leftovers(root: Path, now: float) -> None:
    for left in (each for name in PROBES for each in root.glob(f".{name}.*{TEMPORARY_SUFFIX}")):
        with suppress(FileNotFoundError):  # another one removes it
            if left.stat().st_mtime >= now - _LEFT_S:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
