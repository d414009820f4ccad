"""Atomic replacement of files, fsync, and reads that bypass the caches of an NFS client."""

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV}
"""Error numbers of file systems without hard links, and of a link between two file systems."""
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
"""Error numbers of a folder that this user may read and not write."""
REMOVED_PREFIX = ".nfs"
"""Prefix of the names that NFS gives to removed files which a process on this node has open."""
_NO_EXCHANGE = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


def replace_file(
    path: Path,
    content: str | bytes,
    *,
    mode: int = 0o666,
    sync: bool = True,
    own_name: bool = True,
) -> None:
    """Write a file so that a reader finds the old content or the new content, never a part.

    ``mode`` holds before the umask, whatever the old file has. ``sync`` survives a power cut:
    useless in shared memory, and for content that is worthless after a reboot. Without ``own_name``
    the temporary name is not random: writers must exclude each other, and the next write overwrites
    the temporary file of a killed process.
    """
    temporary = (
        make_temporary_path(path) if own_name else path.with_name(path.name + TEMPORARY_SUFFIX)
    )
    try:
        write_in_place(temporary, content, flag="xb" if own_name else "wb", mode=mode, sync=sync)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def link_or_copy(path: Path, name: Path) -> None:
    """Create a hard link ``name`` to a file; on a file system without hard links, a copy.

    ``name`` must not exist.
    """
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copy2(path, name)
        _sync(name, os.O_RDONLY)


def exchange_names(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the file system cannot.

    Raises:
        OSError: the exchange is supported, and failed, as between two file systems.
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
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make a file durable: its content, and its name."""
    _sync(path, os.O_RDONLY)
    sync_folder(path.parent)


def _sync(path: Path, flags: int) -> None:
    with open_fd(path, flags) as fd:
        os.fsync(fd)


@contextmanager
def open_fd(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> Iterator[int]:
    """Open a file as ``os.open`` does for the length of the block."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
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
    """Make the NFS client look up the names in a folder again; the folder need not exist.

    An NFS client caches for up to a minute (``acdirmax``) which names a folder has and lacks. When
    a folder is opened, it asks the server (close-to-open consistency, nfs(5)).
    """
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def list_uncached(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a folder that another node may just have created or filled.

    Empty if the folder does not exist.
    """
    revalidate_folder(folder.parent.parent)
    revalidate_folder(folder.parent)
    return sorted(folder.glob(pattern))  # opens the folder


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def make_temporary_path(path: Path) -> Path:
    """Return a random path next to a file, for its next content."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def write_in_place(
    path: Path, content: str | bytes, *, flag: str = "xb", mode: int = 0o666, sync: bool = True
) -> None:
    """Write a file in place, without a temporary name.

    ``mode`` holds before the umask. ``sync`` makes the content durable, but not the name.
    """
    with open(path, flag, opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
