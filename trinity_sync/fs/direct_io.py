"""Files to disk and back by direct I/O, in a few threads, digested meanwhile.

Direct I/O leaves the page cache to the training and is two to four times as fast as buffered
writing with fsync on the disks that this was measured on. Where the file system refuses it (tmpfs,
many network file systems), the same loops go through the page cache.

Files are read into fresh memory, in pages of the kernel's choice. Huge ones made a restore slower
and less even on a virtual machine whose host takes freed pages back and has to find each of them.
"""

import errno
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from trinity_sync.fs.locks import reopen_fd
from trinity_sync.fs.progress import no_progress

ALIGNMENT = 4096
CHUNK = 16 << 20
IN_FLIGHT = 4
"""Chunks on their way to the disk at a time: one leaves it idle between two of them."""
DIGEST = "xxh3-128"
_NO_DIRECT_IO = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What file systems without direct I/O answer to an open or a write of it."""
PIECE = 4 << 20
READERS = 4


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
    fd, direct = _open_to_write(path, direct)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as digester:
            # it runs ahead, so the pages of a mapped slot are there when they are written
            digest = digester.submit(digest_bytes, content)
            whole = len(content) // ALIGNMENT * ALIGNMENT if direct else len(content)
            _write_chunks(fd, content[:whole], direct, bytes_per_s)
            if whole < len(content):  # direct I/O ends with a page
                _through_page_cache(fd)
                _write_chunk(fd, content[whole:], whole, direct=False)
        if os.fstat(fd).st_size != len(content):
            os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.result()


def digest_cached_file(path: Path) -> str:
    """Digest of the file at ``path``, in the form of `write_file`."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{DIGEST}:{digest.hexdigest()}"


def digest_bytes(content: memoryview) -> str:
    """Digest of a file's bytes, in the form of `write_file`."""
    return f"{DIGEST}:{xxhash.xxh3_128(content).hexdigest()}"


def _open_to_write(path: Path, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
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
            direct = _through_page_cache(fd)
        try:
            done += os.pwrite(fd, chunk[done:], offset + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                raise
            direct = _through_page_cache(fd)


def read_file(path: Path, nbytes: int) -> tuple[memoryview, str]:
    """The first ``nbytes`` bytes of a file, past the page cache where the file system allows it.

    Returns:
        The bytes, at a page boundary, writable and nobody else's, and their digest in the form of
        `write_file`. A file that is shorter is read as if zeros followed, which the digest shows.

    Raises:
        OSError: the file is missing or the disk is broken.
    """
    with open_direct(path) as fd:
        return read_fd(fd, nbytes)


@contextmanager
def open_direct(path: Path) -> Iterator[int]:
    """A descriptor of a file and of no link, for reads past the page cache where that is allowed.

    Raises:
        OSError: as `read_file`.
    """
    fd = _open_to_read(path)
    try:
        yield fd
    finally:
        os.close(fd)


def digest_file(path: Path, nbytes: int, took: Callable[[int], object] = no_progress) -> str:
    """The digest that `read_file` would return, with a few pieces in memory at a time.

    ``took`` is called with the bytes of each piece.
    """
    digest = xxhash.xxh3_128()
    waiting: deque[tuple[Future[None], memoryview, int]] = deque()

    def take_in() -> memoryview:
        reading, piece, size = waiting.popleft()
        reading.result()
        digest.update(piece[:size])
        took(size)
        return piece

    with open_direct(path) as fd, ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        for at in range(0, nbytes, PIECE):
            full = len(waiting) == 2 * READERS
            piece = take_in() if full else _fresh_memory(min(PIECE, nbytes))
            size = min(PIECE, nbytes - at)
            pages = -(-size // ALIGNMENT) * ALIGNMENT  # direct reads end with a page
            waiting.append((pool.submit(_read, fd, piece[:pages], at), piece, size))
        while waiting:
            take_in()
    return f"{DIGEST}:{digest.hexdigest()}"


def read_fd(fd: int, nbytes: int, *, readers: int = READERS) -> tuple[memoryview, str]:
    """As `read_file`, of an open file, direct if it was opened so, by so many threads."""
    memory = _fresh_memory(nbytes)
    digest = xxhash.xxh3_128()
    starts = range(0, nbytes, PIECE)
    with ThreadPoolExecutor(readers, thread_name_prefix="reader") as pool:
        pieces = [pool.submit(_read, fd, memory[at : at + PIECE], at) for at in starts]
        for at, piece in zip(starts, pieces, strict=True):
            piece.result()
            digest.update(memory[at : min(at + PIECE, nbytes)])
    return memory[:nbytes], f"{DIGEST}:{digest.hexdigest()}"


def map_fd(fd: int, nbytes: int) -> tuple[memoryview, str]:
    """As `read_fd`, of a file in memory and without a copy of it.

    The bytes are the file's for as long as nobody writes to it, so hold its lock; what is written
    to them does not reach the file.
    """
    size = min(nbytes, os.fstat(fd).st_size)
    with reopen_fd(fd) as again:  # what is mapped would keep the lock of ``fd``
        memory = memoryview(mmap.mmap(again, size, access=mmap.ACCESS_COPY) if size else b"")
    return memory, f"{DIGEST}:{xxhash.xxh3_128(memory).hexdigest()}"


def _open_to_read(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
        return os.open(path, flags)


def _fresh_memory(nbytes: int) -> memoryview:
    """Untouched memory, a page longer than asked for at most: direct reads end with a page."""
    size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _read(fd: int, piece: memoryview, offset: int) -> None:
    done, direct = 0, True
    while done < len(piece):
        try:
            count = os.preadv(fd, [piece[done:]], offset + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                raise
            direct = _through_page_cache(fd)
            continue
        if not count:
            return  # the end of the file
        done += count


def _through_page_cache(fd: int) -> bool:
    """Give direct I/O up for an open file; returns False, for whether it is on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
