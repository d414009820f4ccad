"""Atomic replacement of files, fsync, and reads that an NFS cache does not answer."""

import ctypes
import errno
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV}
"""What file systems without hard links answer, and two that a link cannot join."""
REMOVED_PREFIX = ".nfs"
"""Of the name under which NFS keeps a removed file that a process of this node has open."""
_NO_EXCHANGE = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


def replace_file(
    path: Path,
    content: str | bytes,
    *,
    mode: int = 0o666,
    sync: bool = True,
    own_name: bool = True,
) -> None:
    """Write a file so that a reader finds the old content or the new one, never a part.

    Args:
        path: the file.
        content: all that it will hold.
        mode: its permissions from the first byte on, whatever the old file's are, less the umask.
        sync: let a reboot find one of them as well. Useless in shared memory, and for what is
            worthless after a reboot.
        own_name: give each write a temporary name of its own. Without it, writers must exclude each
            other, and the next one overwrites what a killed one has left.
    """
    temporary = (
        make_temporary_path(path) if own_name else path.with_name(path.name + TEMPORARY_SUFFIX)
    )
    try:
        write_whole(temporary, content, flag="xb" if own_name else "wb", mode=mode, sync=sync)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def link_or_copy(path: Path, name: Path) -> None:
    """Give a file a second name; without hard links, give the name to a copy.

    Args:
        path: the file.
        name: no file has it.
    """
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copy2(path, name)
        with name.open("rb") as file:
            os.fsync(file.fileno())


def exchange_names(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically; return False where the file system cannot.

    Args:
        one, other: the folders, on one file system.

    Raises:
        OSError: it can, and it failed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, flag = -100, 2
    if renameat2 is None:
        return False
    if not renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), flag):
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(one))


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_uncached(path: Path) -> bytes:
    """Return the content of a file that another node may just have created or replaced.

    Raises:
        OSError: as ``Path.read_bytes``.
    """
    revalidate_folder(path.parent.parent)
    revalidate_folder(path.parent)
    return path.read_bytes()


def revalidate_folder(folder: Path) -> None:
    """Let the names in a folder, which need not exist, be looked up on the file server again.

    An NFS client caches for up to a minute (``acdirmax``) which names a folder has and lacks. When
    a folder is opened, it asks the server (close-to-open consistency, nfs(5)).
    """
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def list_uncached(folder: Path, pattern: str) -> list[Path]:
    """Return what is in a folder that another node may just have created or filled, sorted.

    Args:
        folder: need not exist.
        pattern: as of ``Path.glob``.
    """
    revalidate_folder(folder.parent.parent)
    revalidate_folder(folder.parent)
    return sorted(folder.glob(pattern))  # opens the folder


def make_folder(folder: Path) -> None:
    """Create a folder and the missing ones above it, each durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def make_temporary_path(path: Path) -> Path:
    """Return a name next to a file for what is to become the file."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def write_whole(
    path: Path, content: str | bytes, *, flag: str = "xb", mode: int = 0o666, sync: bool = True
) -> None:
    """Write a file, by its own name.

    Args:
        path: the file.
        content: all that it will hold.
        flag: as of ``open``.
        mode: its permissions, less the umask.
        sync: make the content durable.
    """
    with open(path, flag, opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
