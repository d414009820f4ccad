"""What processes read from a disk, what they sync, and a disk or descriptors that are used up."""

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def count_read() -> int:
    """Return the bytes that this process has read from disks so far."""
    counts = Path("/proc/self/io").read_text()
    return int(counts.partition("\nread_bytes: ")[2].split()[0])


def drop_cached(path: Path) -> None:
    """Drop a file from the page cache; skip the test if it is not read from a disk then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = count_read()
        file.read(1 << 20)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if count_read() == before:
        pytest.skip(f"reads of {path} are not those of a disk")


def flip_a_byte(path: Path, at: int) -> None:
    """Change the lowest bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: as on a full disk, with another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def noted_syncs(failing: str = "") -> Iterator[set[int]]:
    """Yield the inodes of files that are durable by the syncs of this process within the block.

    The first sync of a file with ``failing`` in its name fails as a kernel's does: the next one has
    no error, and the bytes are not on the disk.
    """
    fsync, durable, lost = os.fsync, set[int](), set[int]()

    def sync(fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if failing and not lost and failing in Path(f"/proc/self/fd/{fd}").resolve().name:
            lost.add(inode)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)
        if inode not in lost:
            durable.add(inode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        yield durable


@contextmanager
def no_file_opens() -> Iterator[None]:
    """Have this process open no file in the block, as one that has too many open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # whatever other threads close
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_opens_of(path: Path) -> Iterator[None]:
    """A file cannot be opened within the block without a wait (EAGAIN): an error that passes.

    This process holds a lease of it, as a file server does for a client that caches it.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # which ends no process, unlike SIGIO
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)


def look(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """All names below a folder with inodes, times and contents."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        at = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = at.st_ino, at.st_mtime_ns, content
    return found
