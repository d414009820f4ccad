"""The best that the machine can do with as many bytes as a rank saves, on all ranks at once."""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from trinity_sync.fs.atomic import sync_folder

CHUNK = 16 << 20
IN_FLIGHT = 4
"""Chunks in flight to or from the disk."""
BUFFER = 1 << 30
"""Bytes of the buffers at most; larger sizes reuse them."""
FRESH = 1 << 30
"""Bytes of fresh memory that are touched at most; the time for more follows from them."""


class Limits:
    """Warm memcpy, direct I/O to and from the disk, and a bare fsync.

    ``nbytes``, which this rank saves, is rounded down to whole pages; ``folder`` is empty.
    """

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._nbytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._buffer = min(BUFFER, self._nbytes)
        self._memory = mmap.mmap(-1, self._buffer)  # aligned, as direct I/O wants it
        self._view = memoryview(self._memory)
        self._source = torch.frombuffer(self._memory, dtype=torch.uint8)
        noise = torch.randint(256, (CHUNK,), dtype=torch.uint8)  # more of it would take seconds
        for part in self._source.split(CHUNK):
            part.copy_(noise[: len(part)])
        self._target = self._source.clone()
        self._folder = folder
        self._path = folder / "raw"

    def of_saving(self) -> dict[tuple[str, str], float]:
        """Return the seconds of what bounds a save, by name and by the metric that it bounds."""
        self._path.unlink(missing_ok=True)
        sync_folder(self._folder)
        return {
            ("warm memcpy", "stall"): self.memcpy_s(),
            ("raw write", "durable"): _timed(self._write),
            ("raw write, existing file", "durable"): _timed(self._write),
            ("fsync alone", "durable"): _timed(self._fsync),
        }

    def memcpy_s(self) -> float:
        """Return the seconds of a warm memcpy of as many bytes, with all cores."""
        return _timed(self._copy)

    def of_loading(self) -> dict[tuple[str, str], float]:
        """Return the seconds of what bounds a load from disk, as `of_saving`."""
        if not self._path.exists():
            self._write()
        return {("raw read", "restore"): _timed(self._read)}

    def _copy(self) -> None:
        for offset in range(0, self._nbytes, self._buffer):
            size = min(self._buffer, self._nbytes - offset)
            self._target[:size].copy_(self._source[:size])

    def _write(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(fd, 0, self._nbytes)
            self._chunks(lambda chunk, offset: os.pwrite(fd, chunk, offset))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self._folder)

    def _read(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._chunks(lambda chunk, offset: os.preadv(fd, [chunk], offset))
        finally:
            os.close(fd)

    def _chunks(self, move: Callable[[memoryview, int], int]) -> None:
        def one(offset: int) -> None:
            start = offset % self._buffer
            size = min(CHUNK, self._nbytes - offset, self._buffer - start)
            if move(self._view[start : start + size], offset) != size:
                raise OSError(f"{self._path}: less than {size} bytes at {offset}")

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            for _ in threads.map(one, range(0, self._nbytes, CHUNK)):
                pass

    def _fsync(self) -> None:
        with (self._folder / "small").open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())


def first_touch(nbytes: int) -> float:
    """Return the seconds to touch fresh memory for a state, in pages of the kernel's choice.

    Measure it before anything else takes what was freed last: a virtual machine's host reclaims
    freed pages, and memory that it has to find again costs several times as much.
    """
    size = min(FRESH, nbytes)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE]
    start = time.perf_counter()
    pages.fill_(1)
    return (time.perf_counter() - start) * nbytes / size


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
