"""Capability probe of the file system of a root, run when a job begins.

A commit relies on a few operations of the file system. Its type, version and mount options say
little about them, so each operation is tried in the root, which takes some milliseconds (two disk
syncs) and leaves nothing behind. Only mounts of object stores are recognized by their type: their
renames look atomic, and are copies. A root without a required capability is refused before the
training begins. What only makes a save faster (hard links, an exchange of folders, direct I/O,
leases) is tried where it is used, and done another way if it fails.

Whether locks and files reach other nodes cannot be probed on one node: see `client.init_root`.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import RootError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, open_fd, sync_folder
from trinity_sync.fs.file_system import Mount, find_mount
from trinity_sync.fs.locks import acquire_file_lock, try_acquire_file_lock

PROBES = ("probe", "meeting", "doctor")
"""Prefixes of the temporary folders and files of probes in a root: ``.probe.*.tmp``."""
_LEFTOVER_S = 3600.0
"""Age in seconds from which such a file was left by a killed process."""


@dataclass(frozen=True)
class Capability:
    """An operation that a commit needs, and whether the file system supports it."""

    name: str
    reason: str
    """Reason why it is not supported; empty if it is."""
    consequence: str
    """Consequence if it is not supported."""


@dataclass(frozen=True)
class Capabilities:
    """Result of the probe of a root."""

    root: Path
    mount: Mount
    each: tuple[Capability, ...]


def require_capabilities(root: Path) -> Capabilities:
    """Probe a root, and require what a commit needs.

    Raises:
        RootError: the root cannot be written, or lacks a required capability.
    """
    found = probe_capabilities(root)
    if lacking := [each for each in found.each if each.reason]:
        raise RootError(
            f"{root} cannot be the root of a job. Its file system ({found.mount}) has no "
            + "; no ".join(f"{a.name} ({a.reason}), so {a.consequence}" for a in lacking)
            + ". Choose a folder on a local disk, or on a shared file system with POSIX semantics; "
            "for an object store, set a remote of the job and keep the root on a disk."
        )
    return found


def probe_capabilities(root: Path) -> Capabilities:
    """Probe a root, and leave it unchanged.

    Raises:
        RootError: the root cannot be written.
    """
    folder = root / f".probe.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        folder.mkdir(0o700)  # another user of the root may move it, but puts no link into it
        with open_fd(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
            found, own = os.fstat(fd), Path(f"/proc/self/fd/{fd}")
            if found.st_uid != os.geteuid() and not find_mount(root).shared:
                raise OSError(errno.EPERM, f"another user has replaced {folder}")
            _remove_leftovers(root, now=found.st_mtime)
            each = tuple(
                Capability(name, _find_failure(attempt, own), without)
                for name, attempt, without in _ATTEMPTS
            )
    except OSError as error:
        action = "Change its owner or mode, mount it for writing"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            action = "Free space there"
        raise RootError(
            f"{root} ({find_mount(root)}) cannot be written: {error.strerror}. {action}, or "
            "choose another root."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Capabilities(root, find_mount(root), each)


class _Unsupported(Exception):
    """The operation had no error, and did not do what it is for."""


def _find_failure(attempt: Callable[[Path], None], folder: Path) -> str:
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


def _try_exclusive_create(folder: Path) -> None:
    (folder / "one").touch(exist_ok=False)
    with suppress(FileExistsError):
        (folder / "one").touch(exist_ok=False)
        raise _Unsupported("a file was created twice")


def _try_sync(folder: Path) -> None:
    with (folder / "file").open("xb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _try_replace(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    before = new.stat()
    new.replace(old)
    after = old.stat()
    if old.read_bytes() != b"new" or new.exists():
        raise _Unsupported("the old file still existed, or the new file existed twice")
    if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise _Unsupported("the rename made a copy")


def _try_move(folder: Path) -> None:
    if (mount := find_mount(folder)).is_object_store:
        raise _Unsupported(f"{mount.kind} copies the files of a folder one by one")
    (folder / "old/below").mkdir(parents=True)
    (folder / "old/below/file").write_bytes(b"x")
    (folder / "old").rename(folder / "new")
    if (folder / "new/below/file").read_bytes() != b"x" or (folder / "old").exists():
        raise _Unsupported("the folder was incomplete after the rename")


def _try_locks(folder: Path) -> None:
    for shared in (True, False):
        with (
            acquire_file_lock(folder / "lock", shared=shared),
            try_acquire_file_lock(folder / "lock") as both,
        ):
            if both:
                raise _Unsupported("a lock was acquired twice")


_ATTEMPTS: tuple[tuple[str, Callable[[Path], None], str], ...] = (
    ("exclusive create", _try_exclusive_create, "two runs could get the same number"),
    ("sync to disk", _try_sync, "a committed step could be gone after a power cut"),
    ("atomic rename of a file", _try_replace, "a manifest or a pointer could be seen torn"),
    ("atomic rename of a folder", _try_move, "a step could be seen half removed"),
    ("locks between processes", _try_locks, "two commits or removals could cross"),
)


def _remove_leftovers(root: Path, now: float) -> None:
    for left in (each for name in PROBES for each in root.glob(f".{name}.*{TEMPORARY_SUFFIX}")):
        with suppress(FileNotFoundError):  # another probe removes it
            if left.stat().st_mtime >= now - _LEFTOVER_S:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
