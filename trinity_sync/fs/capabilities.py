"""What the file system of a root can do: tried out in the root, when a job begins.

A commit is made of a few operations of the file system, and is worth as much as these. Types,
versions and mount options say little about them, so each is tried, in some milliseconds (two syncs
of the disk) and without leaving anything behind. Mounts of object stores alone go by their names:
their renames look as if they were atomic, and are copies. What a commit cannot do without is
refused before the training begins; what only makes it faster is done another way.

That locks and files reach other nodes cannot be seen from one of them: see `client.init_root`.
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
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, exchange, sync_folder
from trinity_sync.fs.direct_io import ALIGNMENT
from trinity_sync.fs.file_lease import is_ours_alone
from trinity_sync.fs.locks import file_lock, file_lock_if_free
from trinity_sync.fs.mounts import Mount, mount_of

PROBES = ("probe", "meeting", "doctor")
"""What is put into a root for a moment: ``.probe.*.tmp``, which is a folder, and files likewise."""
_LEFT_S = 3600.0
"""Age in seconds from which that of a process was left when it was killed."""


@dataclass(frozen=True)
class Ability:
    """One thing that a file system can do, or cannot."""

    name: str
    needed: bool
    """Whether there is no commit without it."""
    why_not: str
    """What was seen in its place; empty if it can."""
    without: str
    """What is done, or cannot be promised, where it cannot."""


@dataclass(frozen=True)
class Abilities:
    """What was found in a root."""

    root: Path
    mount: Mount
    each: tuple[Ability, ...]

    def has(self, name: str) -> bool:
        """Whether it can do that."""
        return any(ability.name == name and not ability.why_not for ability in self.each)


def require_able(root: Path) -> Abilities:
    """Try out what a root can do.

    Raises:
        RootError: it cannot be written, or lacks something that a commit needs.
    """
    found = probe(root)
    if lacking := [ability for ability in found.each if ability.needed and ability.why_not]:
        raise RootError(
            f"{root} cannot be the root of a job. Its file system ({found.mount}) has no "
            + "; no ".join(f"{a.name} ({a.why_not}), so {a.without}" for a in lacking)
            + ". Take a folder on a local disk, or on a shared file system with POSIX semantics; "
            "for an object store, name it in TRINITY_SYNC_REMOTE and keep the root on a disk."
        )
    return found


def probe(root: Path) -> Abilities:
    """Try out what a root can do; it is left as it was.

    Raises:
        RootError: nothing can be written there.
    """
    folder = root / f".probe.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        folder.mkdir()
        _remove_those_that_were_killed(root, now=folder.stat().st_mtime)
        each = tuple(
            Ability(name, needed, _why_not(attempt, folder), without)
            for name, needed, attempt, without in _ATTEMPTS
        )
    except OSError as error:
        todo = "Change its owner or mode, mount it for writing"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            todo = "Make room there"
        raise RootError(
            f"{root} ({mount_of(root)}) cannot be written: {error.strerror}. {todo}, or take "
            "another root."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Abilities(root, mount_of(root), each)


class _Wrong(Exception):
    """The operation did something, but not what it is for."""


def _why_not(attempt: Callable[[Path], None], folder: Path) -> str:
    own = folder / attempt.__name__
    try:
        own.mkdir()
        attempt(own)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return error.strerror or type(error).__name__
    except _Wrong as wrong:
        return str(wrong)
    return ""


def _exclusive(folder: Path) -> None:
    (folder / "one").touch(exist_ok=False)
    try:
        (folder / "one").touch(exist_ok=False)
    except FileExistsError:
        return
    raise _Wrong("a file was made twice")


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
        raise _Wrong("the old file was still there, or the new one twice")
    if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise _Wrong("the file is another one afterwards: a copy")


def _moved(folder: Path) -> None:
    if (mount := mount_of(folder)).is_object_store:
        raise _Wrong(f"{mount.kind} copies the files of a folder, one after the other")
    (folder / "old/below").mkdir(parents=True)
    (folder / "old/below/file").write_bytes(b"x")
    (folder / "old").rename(folder / "new")
    if (folder / "new/below/file").read_bytes() != b"x" or (folder / "old").exists():
        raise _Wrong("it did not arrive whole")


def _locked(folder: Path) -> None:
    for shared in (True, False):
        with (
            file_lock(folder / "lock", shared=shared),
            file_lock_if_free(folder / "lock") as both,
        ):
            if both:
                raise _Wrong("two had the same lock at once")


def _exchanged(folder: Path) -> None:
    for name in ("one", "other"):
        (folder / name).mkdir()
        (folder / name / name).touch()
    if not exchange(folder / "one", folder / "other"):
        raise _Wrong("not supported")
    if not (folder / "one/other").exists():
        raise _Wrong("nothing was exchanged")


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
    if not is_ours_alone(folder / "file"):
        raise _Wrong("the kernel gives no lease")


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


def _remove_those_that_were_killed(root: Path, now: float) -> None:
    for left in (each for name in PROBES for each in root.glob(f".{name}.*{TEMPORARY_SUFFIX}")):
        with suppress(FileNotFoundError):  # another one removes it
            if left.stat().st_mtime >= now - _LEFT_S:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
