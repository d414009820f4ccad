"""Atomic replacement of files, fsync, reads past the caches of an NFS client, waits for changes."""

import ctypes
import errno
import fnmatch
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}" + re.escape(TEMPORARY_SUFFIX))
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
def open_fd(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file, which this user alone may use if it is new, for the length of the block."""
    fd = os.open(path, flags, 0o600)
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

    Raises:
        OSError: it cannot be opened, or is a link to none.
    """
    revalidate_folder(folder.parent.parent)
    revalidate_folder(folder.parent)
    try:
        # `Path.glob` takes a folder that it may not open for an empty one
        return sorted(path for path in folder.iterdir() if fnmatch.fnmatch(path.name, pattern))
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []


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


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a temporary file of this project."""
    return bool(_TEMPORARY.fullmatch(name))


def write_in_place(
    path: Path, content: str | bytes, *, flag: str = "xb", mode: int = 0o666, sync: bool = True
) -> None:
    """Write a file in place, without a temporary name.

    ``mode`` holds before the umask. ``sync`` makes the content durable, but not the name.
    """
    with open(path, flag, opener=partial(os.open, mode=mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if sync:
            file.flush()
            os.fsync(file.fileno())


T = TypeVar("T")

FileSignature = tuple[int, int, int] | None
"""Inode, size and time (ns) of a file or folder; None if there is none."""

LEAST_PAUSE_S = 0.01
MOST_PAUSE_S = 0.2

_TICK_NS = 100_000_000
"""Nanoseconds within which a file system may give two changes the same time: some ms on Linux."""


def read_signature(path: Path) -> FileSignature:
    """Return the signature of a file or folder.

    It changes when the file is replaced, or a name in the folder is created, replaced or removed.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def lengthen_pauses(most_s: float = MOST_PAUSE_S) -> Iterator[float]:
    """Yield the seconds between two looks of a wait, which double up to ``most_s``."""
    pause_s = LEAST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)


class ReadOnChange(Generic[T]):
    """Content that is read again only after its file or folder has changed.

    A file is only ever replaced, also by another node. After an error of ``read``, the next `get`
    reads again.
    """

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        self._path, self._read = path, read
        self._cached: tuple[FileSignature, T] | None = None

    def get(self) -> T:
        """Return the content."""
        revalidate_folder(self._path.parent.parent)
        revalidate_folder(self._path.parent)
        signature = read_signature(self._path)
        if self._cached and self._cached[0] == signature:
            return self._cached[1]
        # the next change has another time only if the last one is some ticks before the read
        settled = signature is not None and time.time_ns() - signature[2] > _TICK_NS
        self._cached = None
        content = self._read()
        if settled:
            self._cached = signature, content
        return content
