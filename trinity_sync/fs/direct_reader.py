"""One file into memory, the mirror of ``writer``: direct I/O in a few threads, digested meanwhile.

The memory is fresh, in pages of the kernel's choice. Huge ones made a restore slower and less even
on a virtual machine whose host takes freed pages back: it has to find each of them anew.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from trinity_sync.fs.direct_writer import (
    ALIGNMENT,
    DIGEST,
    NO_DIRECT_IO,
    through_page_cache,
)
from trinity_sync.fs.flock import opened_again
from trinity_sync.fs.progress import unmetered

PIECE = 4 << 20
READERS = 4


def read_file(path: Path, nbytes: int) -> tuple[memoryview, str]:
    """The first ``nbytes`` bytes of a file, past the page cache where the file system allows it.

    Returns:
        The bytes, at a page boundary, writable and nobody else's, and their digest in the form of
        ``write_file``. A file that is shorter is read as if zeros followed, which the digest shows.

    Raises:
        OSError: the file is missing or the disk is broken.
    """
    with opened(path) as fd:
        return read_open(fd, nbytes)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a file and of no link, for reads past the page cache where that is allowed.

    Raises:
        OSError: as `read_file`.
    """
    fd = _open(path)
    try:
        yield fd
    finally:
        os.close(fd)


def digest_file(path: Path, nbytes: int, took: Callable[[int], object] = unmetered) -> str:
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

    with opened(path) as fd, ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        for at in range(0, nbytes, PIECE):
            full = len(waiting) == 2 * READERS
            piece = take_in() if full else _fresh_memory(min(PIECE, nbytes))
            size = min(PIECE, nbytes - at)
            pages = -(-size // ALIGNMENT) * ALIGNMENT  # direct reads end with a page
            waiting.append((pool.submit(_read, fd, piece[:pages], at), piece, size))
        while waiting:
            take_in()
    return f"{DIGEST}:{digest.hexdigest()}"


def read_open(fd: int, nbytes: int, *, readers: int = READERS) -> tuple[memoryview, str]:
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


def map_open(fd: int, nbytes: int) -> tuple[memoryview, str]:
    """As `read_open`, of a file in memory and without a copy of it.

    The bytes are the file's for as long as nobody writes to it, so hold its lock; what is written
    to them does not reach the file.
    """
    size = min(nbytes, os.fstat(fd).st_size)
    with opened_again(fd) as again:  # what is mapped would keep the lock of ``fd``
        memory = memoryview(mmap.mmap(again, size, access=mmap.ACCESS_COPY) if size else b"")
    return memory, f"{DIGEST}:{xxhash.xxh3_128(memory).hexdigest()}"


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in NO_DIRECT_IO:
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
            if not direct or error.errno not in NO_DIRECT_IO:
                raise
            direct = through_page_cache(fd)
            continue
        if not count:
            return  # the end of the file
        done += count
