"""Waits for other processes' files: one stat tells whether to read again, and pauses get longer."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from trinity_sync.fs.atomic import revalidate_folder

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


def lengthen_pauses() -> Iterator[float]:
    """Yield the seconds between two looks of a wait, which double up to `MOST_PAUSE_S`."""
    pause_s = LEAST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MOST_PAUSE_S)


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
