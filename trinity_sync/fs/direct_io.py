"""Reads and writes of files with direct I/O, in a few threads, digested meanwhile.

Direct I/O leaves the page cache to the training, and is two to four times as fast as buffered
writes with fsync on the disks that were measured. If the file system refuses it (tmpfs, many
network file systems), the same loops go through the page cache.

A speed limit is shared by all processes of a node. A node's checkpoints are written by several Ray
processes with several threads each, none of which knows how many others write. So they share a file
with the time until which the admitted bytes are paid for. The next bytes begin then: their writer
adds their time under the file's lock, and waits without it, as it may be stopped meanwhile.
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import xxhash

from trinity_sync.fs.atomic import UNSUPPORTED, open_fd, open_regular

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], object]
"""Called from any thread with the amount since the last call, and the total.

Both are in bytes unless the function that takes the callback says otherwise. Work that turns out to
be done already counts, so the amounts of a complete run add up to about the total.
"""


def no_progress(done: int, total: int = 0) -> None:
    """Ignore the progress."""


OnWritten = Callable[[int, int], object]
"""Called with the offset of what has been written, and its size in bytes."""

CHUNK = 16 << 20
"""Most bytes that are written, and admitted, at a time."""
_MOST_AHEAD = 64
"""Most writers of `CHUNK` bytes that wait in a line; a time further ahead is wrong."""
_PAID_AT = struct.Struct("<d")


class RateLimit:
    """A limit of bytes per second for everything that uses the same file.

    The file lies in memory, in a folder of this user, and is created if it is missing. ``clock``
    returns monotonic seconds, the same for all processes of the node.
    """

    def __init__(
        self,
        path: Path,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._path, self._bytes_per_s = path, bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._warned = False

    def admit(self, nbytes: int) -> None:
        """Wait until bytes, at most `CHUNK`, may be written, and count them.

        Without its file, as in a full spool, there is no limit: a write does not fail for it.
        """
        try:
            self._admit(nbytes)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("writing without a speed limit: %s", error)

    def _admit(self, nbytes: int) -> None:
        with open_fd(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            now = self._clock()
            content = os.pread(fd, _PAID_AT.size, 0)
            paid_at = _PAID_AT.unpack(content)[0] if len(content) == _PAID_AT.size else now
            wait_s = max(0.0, paid_at - now)
            if wait_s > _MOST_AHEAD * CHUNK / self._bytes_per_s:  # from before a reboot
                wait_s = 0.0
            os.pwrite(fd, _PAID_AT.pack(now + wait_s + nbytes / self._bytes_per_s), 0)
        self._sleep(wait_s)


ALIGNMENT = 4096
IN_FLIGHT = 4
"""Number of chunks in flight: with one, the disk is idle between two of them."""
DIGEST = "xxh3-128"
PIECE = 4 << 20
READERS = 4
SCATTERED = 1 << 20
"""Bytes of a read to many places: they are in a core's cache when they are digested."""
_AHEAD = 2 * READERS
"""Pieces that are read ahead: further ahead, they would not be in the cache."""
_MOST_PARTS = 1024
"""Most parts of one read (``IOV_MAX``)."""


def write_file(
    path: Path,
    content: memoryview,
    *,
    direct: bool = True,
    limit: RateLimit | None = None,
    parts: Iterable[memoryview] = (),
    on_written: OnWritten = no_progress,
) -> str:
    """Write a file durably and return its digest (``xxh3-128:...``).

    An existing file is overwritten in place, which is faster; the folder must exist. Direct I/O
    needs ``content`` aligned to a page in memory, as in a mapped slot; otherwise the page cache is
    used. ``limit`` leaves bandwidth of the node to others. ``parts`` are those of ``content`` in
    order, for a caller that looks at each once it is digested; it runs in the digesting thread.
    ``on_written`` is called with each written chunk, in a writing thread.

    Raises:
        OSError: the disk is full, read-only or broken; ``path`` may be partially written.
    """
    fd, direct = _open(path, os.O_WRONLY | os.O_CREAT, direct)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as digester:
            # it runs ahead, so the pages of a mapped slot are present when they are written
            digest = digester.submit(digest_parts, parts or (content,))
            whole = len(content) // ALIGNMENT * ALIGNMENT if direct else len(content)
            _write_chunks(fd, content[:whole], direct, limit, on_written)
            if whole < len(content):  # direct I/O ends with a page
                _turn_off_direct(fd)
                _write_chunk(fd, content[whole:], whole, direct=False)
        if os.fstat(fd).st_size != len(content):
            os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.result()


def digest_cached_file(path: Path) -> str:
    """Return the digest of a file, read through the page cache, in the form of `write_file`."""
    with open_to_read(path, direct=False) as fd:
        return digest_parts(iter(partial(os.read, fd, CHUNK), b""))


def digest_parts(parts: Iterable[memoryview | bytes]) -> str:
    """Return the digest of consecutive bytes, in the form of `write_file`."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return f"{DIGEST}:{digest.hexdigest()}"


def _open(path: Path, flags: int, direct: bool = True) -> tuple[int, bool]:
    """Open a regular file; return its descriptor and whether it is open for direct I/O."""
    if direct:
        try:
            return open_regular(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    return open_regular(path, flags, 0o644), False


def _write_chunks(
    fd: int, content: memoryview, direct: bool, limit: RateLimit | None, on_written: OnWritten
) -> None:
    """Write whole pages, which direct I/O requires."""
    in_flight: deque[Future[None]] = deque()
    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="writer") as writers:
        for offset in range(0, len(content), CHUNK):
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().result()
            chunk = content[offset : offset + CHUNK]
            if limit:
                limit.admit(len(chunk))
            in_flight.append(writers.submit(_write_chunk, fd, chunk, offset, direct, on_written))
        for writing in in_flight:
            writing.result()


def _write_chunk(
    fd: int, chunk: memoryview, offset: int, direct: bool, on_written: OnWritten = no_progress
) -> None:
    done = 0
    while done < len(chunk):
        if direct and done % ALIGNMENT:  # a short write
            direct = _turn_off_direct(fd)
        try:
            done += (count := os.pwrite(fd, chunk[done:], offset + done))
            if not count:  # as of a FUSE server: it would do so for ever
                raise OSError(errno.EIO, "the file system writes nothing, and names no error")
        except OSError as error:
            if not direct or error.errno not in UNSUPPORTED:
                raise
            direct = _turn_off_direct(fd)
    with suppress(OSError):  # it is advice to the kernel
        on_written(offset, done)


@contextmanager
def open_to_read(path: Path, *, direct: bool = True) -> Iterator[int]:
    """Open a regular file, for reads past the page cache if the file system allows it.

    A file that several processes of the node read is better not ``direct``: it is read once.

    Raises:
        OSError: the file is missing or the disk is broken.
    """
    fd, _ = _open(path, os.O_RDONLY, direct)
    try:
        yield fd
    finally:
        os.close(fd)


def digest_file(path: Path, nbytes: int, on_read: Callable[[int], object] = no_progress) -> str:
    """Return the digest of the first ``nbytes`` of a file, with a few pieces in memory at a time.

    A shorter file has the digest of its own bytes. ``on_read`` is called with the size of each
    piece in bytes, in a reading thread.
    """
    with open_to_read(path) as fd:
        return digest_fd(fd, nbytes, lambda _, piece: on_read(len(piece)))


def digest_fd(
    fd: int, nbytes: int, take: Callable[[int, memoryview], object] = lambda _at, _piece: None
) -> str:
    """Return the digest of an open file as `digest_file` does.

    ``take`` is called with the first byte and the content of each piece, which it may copy, in a
    reading thread.
    """
    room = -(-min(PIECE, nbytes) // ALIGNMENT) * ALIGNMENT  # direct reads end with a page
    memory = _allocate(min(_AHEAD * room, nbytes + ALIGNMENT), huge=nbytes >= PIECE)

    def read(at: int, size: int) -> list[memoryview]:
        start = at // PIECE % _AHEAD * room
        piece = memory[start : start + -(-size // ALIGNMENT) * ALIGNMENT]
        piece = piece[: min(_read(fd, piece, at), size)]
        take(at, piece)
        return [piece]

    return digest_parts(_read_ahead(nbytes, PIECE, read))


def scatter_fd(fd: int, nbytes: int, places: Callable[[int, int], Sequence[memoryview]]) -> str:
    """Read an open file of the page cache to many places, without a buffer; return its digest.

    ``places`` returns the memory, in one or more parts, for a number of bytes from an offset on. A
    shorter file has the digest of its own bytes.
    """
    digest = xxhash.xxh3_128()

    def read(at: int, before: Future[None] | None = None) -> None:
        parts, filled = places(at, min(SCATTERED, nbytes - at)), list[memoryview]()
        for first in range(0, len(parts), _MOST_PARTS):
            into = parts[first : first + _MOST_PARTS]
            at += (left := os.preadv(fd, into, at))
            for part in into:
                filled.append(part[:left])
                left = max(0, left - len(part))
        if before:
            before.result()  # in the order of the file, by the core that has it in its cache
        for part in filled:
            digest.update(part)

    # unlike reads of a disk, copies want a core each
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # the ranks of the node share them
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    starts, ahead = range(0, nbytes, SCATTERED), deque[Future[None]]()
    if cores < 2:
        for at in starts:
            read(at)
    else:
        with ThreadPoolExecutor(min(READERS, cores), thread_name_prefix="reader") as pool:
            for at in starts:
                if len(ahead) == _AHEAD:
                    ahead.popleft().result()
                ahead.append(pool.submit(read, at, ahead[-1] if ahead else None))
            for reading in ahead:
                reading.result()
    return f"{DIGEST}:{digest.hexdigest()}"


def read_fd(fd: int, nbytes: int) -> tuple[memoryview, str]:
    """Read the first ``nbytes`` of an open file, with direct I/O if it was opened for that.

    Return the bytes, aligned to a page, writable and owned by the caller, and their digest in the
    form of `write_file`. A shorter file is padded with zeros, and has the digest of its own bytes.
    """
    memory = _allocate(nbytes)

    def read(at: int, size: int) -> list[memoryview]:
        return [memory[at : at + min(_read(fd, memory[at : at + PIECE], at), size)]]

    return memory[:nbytes], digest_parts(_read_ahead(nbytes, PIECE, read))


def _read_ahead(
    nbytes: int, size: int, read: Callable[[int, int], Iterable[memoryview]]
) -> Iterator[memoryview]:
    """Yield consecutive bytes, of which threads read two pieces each ahead.

    ``read`` returns the parts of a piece for its first byte and its size. They are not used once
    the next piece is: it may be read to the same memory, and is in the cache when it is digested.
    """
    ahead: deque[Future[Iterable[memoryview]]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="reader") as pool:
        for at in range(0, nbytes, size):
            if len(ahead) == _AHEAD:
                yield from ahead.popleft().result()
            ahead.append(pool.submit(read, at, min(size, nbytes - at)))
        while ahead:
            yield from ahead.popleft().result()


def map_fd(fd: int, nbytes: int) -> memoryview:
    """Map an open file in memory; return its first bytes, without a copy.

    A file shorter than ``nbytes`` is not padded. The bytes are valid as long as the file is not
    written to, so hold its lock; writes to them do not reach the file.
    """
    size = min(nbytes, os.fstat(fd).st_size)
    with open_fd(f"/proc/self/fd/{fd}") as again:  # a mapping of ``fd`` would keep its lock
        return memoryview(mmap.mmap(again, size, access=mmap.ACCESS_COPY) if size else b"")


def _allocate(nbytes: int, *, huge: bool = False) -> memoryview:
    """Allocate new memory, up to a page longer than asked for: direct reads end with a page.

    Direct I/O is up to twice as fast in ``huge`` pages, but new ones can be dear: have few.
    """
    size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _read(fd: int, piece: memoryview, offset: int) -> int:
    """Fill a piece from an offset in a file; return the number of bytes that the file has there."""
    done, direct = 0, True
    while done < len(piece):
        try:
            count = os.preadv(fd, [piece[done:]], offset + done)
        except OSError as error:
            if not direct or error.errno not in UNSUPPORTED:
                raise
            direct = _turn_off_direct(fd)
            continue
        if not count:  # the end of the file
            break
        done += count
    return done


def _turn_off_direct(fd: int) -> bool:
    """Turn off direct I/O for an open file; return False, the new value of ``direct``."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
