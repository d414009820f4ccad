"""One image to one file: direct I/O of a few chunks at a time, the digest beside them.

Direct I/O leaves the page cache to the training and is two to four times as fast as buffered
writing with fsync on the disks that this was measured on. Where the file system refuses it (tmpfs,
many network file systems), the same loop writes through the page cache.
"""

import errno
import fcntl
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

ALIGNMENT = 4096
CHUNK = 16 << 20
IN_FLIGHT = 4
"""Chunks on their way to the disk at a time: one leaves it idle between two of them."""
DIGEST = "xxh3-128"
NO_DIRECT_IO = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What file systems without direct I/O answer to an open or a write of it."""


def write_file(
    path: Path, content: memoryview, *, direct: bool = True, bytes_per_s: float = 0.0
) -> str:
    """Write ``content`` to ``path``, durably, and return its digest (``xxh3-128:...``).

    Args:
        path: written over if it exists, which is the faster way; its folder must exist.
        content: bytes to write. Direct I/O wants them at a page boundary of memory, as a mapped
            slot is, and is given up silently where they are not.
        direct: try direct I/O.
        bytes_per_s: speed limit, so that a save leaves the disk to others; 0 for none.

    Raises:
        OSError: the disk is full, read-only or broken; ``path`` may be left half written.
    """
    fd, direct = _open(path, direct)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as digester:
            # it runs ahead, so the pages of a mapped slot are there when they are written
            digest = digester.submit(digest_of_bytes, content)
            whole = len(content) // ALIGNMENT * ALIGNMENT if direct else len(content)
            _write_chunks(fd, content[:whole], direct, bytes_per_s)
            if whole < len(content):  # direct I/O ends with a page
                through_page_cache(fd)
                _write_chunk(fd, content[whole:], whole, direct=False)
        if os.fstat(fd).st_size != len(content):
            os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.result()


def digest_of(path: Path) -> str:
    """Digest of the file at ``path``, in the form of `write_file`."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{DIGEST}:{digest.hexdigest()}"


def digest_of_bytes(content: memoryview) -> str:
    """Digest of a file's bytes, in the form of `write_file`."""
    return f"{DIGEST}:{xxhash.xxh3_128(content).hexdigest()}"


def _open(path: Path, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
    return os.open(path, flags, 0o644), False


def _write_chunks(fd: int, content: memoryview, direct: bool, bytes_per_s: float) -> None:
    """Write what direct I/O can: whole pages."""
    under_way: deque[Future[None]] = deque()
    start = time.monotonic()
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="writer") as writers:
        for offset in range(0, len(content), CHUNK):
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().result()
            chunk = content[offset : offset + CHUNK]
            under_way.append(writers.submit(_write_chunk, fd, chunk, offset, direct))
            if bytes_per_s:
                due = start + (offset + len(chunk)) / bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
        for writing in under_way:
            writing.result()


def _write_chunk(fd: int, chunk: memoryview, offset: int, direct: bool) -> None:
    done = 0
    while done < len(chunk):
        if direct and done % ALIGNMENT:  # the disk took less than it was given
            direct = through_page_cache(fd)
        try:
            done += os.pwrite(fd, chunk[done:], offset + done)
        except OSError as error:
            if not direct or error.errno not in NO_DIRECT_IO:
                raise
            direct = through_page_cache(fd)


def through_page_cache(fd: int) -> bool:
    """Give direct I/O up for an open file; returns False, for whether it is on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
