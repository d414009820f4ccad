"""What processes read from a disk, and a disk that is full."""

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
