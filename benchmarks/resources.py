"""CPU time and memory of a process tree, as the kernel reports them; and the page cache."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

INTERVAL_S = 0.02


def tree(roots: Iterable[int]) -> list[psutil.Process]:
    """Return the processes ``roots`` and all their descendants."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            found.update({p.pid: p for p in (process, *process.children(recursive=True))})
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def cpu_seconds(roots: Iterable[int]) -> float:
    """Return the CPU time of the trees below ``roots``, with that of children that ended."""
    seconds = 0.0
    for process in tree(roots):
        try:
            seconds += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return seconds


def memory_bytes(root: int) -> int:
    """Return the anonymous and shared memory of a tree, each page counted once.

    Shared memory counts by its mappings, not by the size of ``/dev/shm``, which other programs use
    as well. Mapped files do not count: their pages are cache.
    """
    kilobytes = 0
    for process in tree([root]):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended meanwhile
        for line in lines:
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kilobytes += int(line.split()[1])
    return kilobytes << 10


class Peak:
    """The most memory that was seen, in bytes."""

    nbytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Watch this process's tree within the block."""
    peak = Peak()
    over = threading.Event()

    def watch() -> None:
        while True:
            peak.nbytes = max(peak.nbytes, memory_bytes(os.getpid()))
            if over.wait(INTERVAL_S):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def drop_page_cache(folder: Path) -> None:
    """Have the files below ``folder``, which must be durable, read from the disk next time."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def available_bytes() -> int:
    """Return the memory that is available without swapping."""
    return int(psutil.virtual_memory().available)
