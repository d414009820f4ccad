"""Atomic replacement of files, fsync, reads past the caches of an NFS client, waits for changes.

In a root that a group shares, any name may become another user's link at any moment. So what
changes names works in folders that are open (`pin_folder`).
"""

import ctypes
import errno
import fnmatch
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from io import UnsupportedOperation
from pathlib import Path
from typing import IO, Any, Generic, ParamSpec, TypeVar

from trinity_sync.layout import PRIVATE_FOLDER

TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}" + re.escape(TEMPORARY_SUFFIX))
NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
"""Error numbers of file systems without hard links, or without more, and between two of them."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers of a full disk, and of a user's quota."""
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, *NO_ROOM}
"""Error numbers of a folder that this user may read and not write, or that has no room."""
STALE_S = 2.0
"""Seconds for which a file of NFS that is opened may be one that another node has removed."""
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Error numbers of file systems without direct I/O, or without an exchange of names."""
WRONG_KIND = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}
"""Error numbers of a link, a file, a folder or a pipe in the place of something else."""
REMOVED_PREFIX = ".nfs"
"""Prefix of the names that NFS gives to removed files which a process on this node has open."""
TRUSTED = "TRINITY_SYNC_TRUSTED_PATHS"
_IN_ROOT = re.compile(rf"(?:^|/)(?:{re.escape(PRIVATE_FOLDER)}|global_step_\d+)(?:/|\Z)")
_LINKED = "it is a link that another user may have made, and is not followed; move it away"
_IRREGULAR = "it is a link, a pipe or otherwise no regular file, and is not opened; move it away"
_MOST_BYTES = 256 << 20
"""Bytes of a record that are read: one that is longer is torn."""

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def pin_folder(folder: Path) -> Iterator[Path]:
    """Yield a path that leads to the same folder within the block, also if it is moved meanwhile.

    No link is followed in a root's private folder, and in the place of a step only one of this user
    or root (OSError). A folder elsewhere is yielded as it is.
    """
    if not _IN_ROOT.search(str(folder)):
        yield folder
        return
    with pin_folder(folder.parent) as parent:
        is_first = parent == folder.parent
        fd = _open_folder(parent / folder.name, follows=is_first and folder.name != PRIVATE_FOLDER)
        try:
            yield Path(f"/proc/self/fd/{fd}")
        except OSError as error:
            error.strerror = _LINKED if error.errno == errno.ELOOP else error.strerror
            error.filename = error.filename or str(folder)  # a write names no file
            for name in ("filename", "filename2"):
                if found := getattr(error, name):
                    setattr(error, name, str(found).replace(f"/proc/self/fd/{fd}/", f"{folder}/"))
            raise
        finally:
            os.close(fd)


def _open_folder(path: Path, *, follows: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except NotADirectoryError:
        with open_fd(path, os.O_PATH | os.O_NOFOLLOW) as link:
            found = os.fstat(link)
            if not stat.S_ISLNK(found.st_mode):
                raise
            if not follows or found.st_uid not in (os.geteuid(), 0):
                raise OSError(errno.ELOOP, _LINKED, os.fspath(path)) from None
            return os.open(path.parent / os.readlink("", dir_fd=link), flags)


def pinned(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function work in the folders of its paths while these are pinned."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as pins:
            paths: list[Any] = [
                pins.enter_context(pin_folder(each.parent)) / each.name
                if isinstance(each, Path)
                else each
                for each in args
            ]
            return function(*paths, **kwargs)

    return call


def open_regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of an unknown owner: no link is followed, and no pipe is waited for.

    Raises:
        OSError: it cannot be opened; it is also a ValueError if something else has its name, as
            that of a record that is torn.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        raise UnsupportedOperation(error.errno, _IRREGULAR, os.fspath(path)) from None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        raise UnsupportedOperation(errno.ENXIO, _IRREGULAR, os.fspath(path))
    except OSError:
        os.close(fd)
        raise


def open_no_follow(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a file as `open_regular`."""
    return open(path, mode, opener=open_regular)


def read_file(path: Path) -> bytes:
    """Return the content of a record, which any user may have written; raises as `open_regular`.

    One that is replaced or removed on NFS while it is read is stale, until this node has heard so.
    """
    end = time.monotonic() + STALE_S
    while True:
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                return file.read(min(os.fstat(file.fileno()).st_size, _MOST_BYTES))
        except OSError as error:
            error.filename = error.filename or os.fspath(path)  # a read names no file
            if error.errno != errno.ESTALE or time.monotonic() > end:
                raise
        time.sleep(0.01)


@pinned
def open_to_append(path: Path) -> IO[bytes]:
    """Open a file to read and to append, created if it is missing, as `open_no_follow`."""
    return open_no_follow(path, "a+b")


def is_own(fd: int) -> bool:
    """Return whether this user, or root, owns an open file and no other user may write it.

    Call it before the first byte is read: another writer may change the file during the read.
    """
    found = os.fstat(fd)
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022


def is_trusted(fd: int) -> bool:
    """Return whether an open file may be unpickled in full; call it when `is_own` may be called."""
    real = Path(f"/proc/self/fd/{fd}").readlink()
    named = filter(None, os.environ.get(TRUSTED, "").split(os.pathsep))
    return is_own(fd) or any(real.is_relative_to(Path(folder).resolve()) for folder in named)


def replace_file(
    path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = True, own_name: bool = True
) -> None:
    """Write a file so that a reader finds the old content or the new content, never a part.

    ``mode`` holds before the umask, whatever the old file has. ``sync`` survives a power cut:
    useless in shared memory, and for content that is worthless after a reboot. Without ``own_name``
    the temporary name is not random: writers must exclude each other, and the next write overwrites
    the temporary file of a killed process.
    """
    if _IN_ROOT.search(str(path.parent)):  # a decorator would be a call of each save
        with pin_folder(path.parent) as folder:
            path = folder / path.name
            return replace_file(path, content, mode=mode, sync=sync, own_name=own_name)
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


@pinned
def move(path: Path, name: Path) -> None:
    """Rename a file or folder."""
    path.rename(name)


@pinned
def remove_file(path: Path) -> None:
    """Remove a file, if there is one."""
    path.unlink(missing_ok=True)


@pinned
def remove_tree(folder: Path) -> bool:
    """Remove a folder, or what is there in its place; return whether nothing of it is left.

    A folder with a file that NFS keeps (`REMOVED_PREFIX`) stays for the next removal.

    Raises:
        OSError: something else cannot be removed.
    """
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return True
    shutil.rmtree(folder, ignore_errors=True)
    left = [*walk_files(folder)]
    if left and all(path.name.startswith(REMOVED_PREFIX) for path in left):
        return False
    if folder.exists():
        shutil.rmtree(folder)  # raises the reason
    return True


@pinned
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


@pinned
def copy_links(path: Path) -> None:
    """Replace a file that has other names by a durable copy."""
    copy = make_temporary_path(path)
    try:
        shutil.copy2(path, copy)
        _sync(copy, os.O_RDONLY)
        copy.replace(path)
    finally:
        copy.unlink(missing_ok=True)


@pinned
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
    if code in UNSUPPORTED:
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
        try:
            os.fsync(fd)
        except OSError as error:
            error.filename = os.fspath(path)
            raise


@contextmanager
def open_fd(path: str | Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file, which this user alone may use if it is new, for the length of the block."""
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def read_uncached(path: Path) -> bytes:
    """Return what `read_file` does of a record that another node may just have replaced."""
    revalidate_folder(path.parent.parent)
    revalidate_folder(path.parent)
    return read_file(path)


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
    return list_paths(folder, pattern)


def list_paths(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a folder whose names match; empty if the folder does not exist.

    ``a*/*.pt`` are those in all folders in it that match ``a*``.

    Raises:
        OSError: it cannot be opened, which `Path.glob` takes for empty; or is a link to none.
    """
    first, _, rest = pattern.partition("/")
    if rest:
        folders = filter(Path.is_dir, list_paths(folder, first))
        return [path for each in folders for path in list_paths(each, rest)]
    try:
        return sorted(path for path in folder.iterdir() if fnmatch.fnmatch(path.name, pattern))
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []


def walk_files(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """Yield the files and links below a folder whose names match; links are not followed.

    None if it does not exist.

    Raises:
        OSError: a folder cannot be opened, which `Path.rglob` takes for empty.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for path in (Path(parent, name) for name in fnmatch.filter((*folders, *names), pattern)):
            if path.is_symlink() or path.is_file():
                yield path


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each durably."""
    with suppress(FileNotFoundError), pin_folder(folder) as found:
        if found.is_dir():
            return
    make_folder(folder.parent)
    with pin_folder(folder.parent) as parent:
        (parent / folder.name).mkdir(exist_ok=True)
        sync_folder(parent)


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


FileSignature = tuple[int, int, int] | None
"""Inode, size and time (ns) of a file or folder; None if there is none."""

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


def lengthen_pauses(most_s: float = 0.2) -> Iterator[float]:
    """Yield the seconds between two looks of a wait, which double up to ``most_s``."""
    pause_s = 0.01
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
