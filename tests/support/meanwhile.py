"""Something that happens in the middle of another: when a file is opened or renamed."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.path_calls import follow_fd

_waiting: dict[tuple[str, str], Callable[[], object]] = {}
_closed = set[str]()


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.scandir", "os.listdir") and _closed and str(arguments[0]) in _closed:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(arguments[0]))
    about = (event, follow_fd(str(arguments[0]))) if _waiting and arguments else None
    if about and (body := _waiting.pop(about, None)):
        body()


sys.addaudithook(_look)  # it stays until the process ends


@contextmanager
def when_opened(path: Path, body: Callable[[], object]) -> Iterator[None]:
    """Call ``body`` once, the instant before this process opens ``path`` for the first time."""
    _waiting["open", str(path)] = body
    yield
    assert not _waiting.pop(("open", str(path)), None), f"{path} was not opened"


@contextmanager
def when_renamed(path: Path, body: Callable[[], object]) -> Iterator[None]:
    """Call ``body`` once, the instant before this process renames ``path``."""
    _waiting["os.rename", str(path)] = body
    yield
    assert not _waiting.pop(("os.rename", str(path)), None), f"{path} was not renamed"


@contextmanager
def not_listed(folder: Path) -> Iterator[None]:
    """Have this process list a folder no more in the block, as one that it may not read."""
    _closed.add(str(folder))
    try:
        yield
    finally:
        _closed.discard(str(folder))


@contextmanager
def hanging_when_opened(path: Path) -> Iterator[threading.Event]:
    """Hold up what first opens ``path`` here until the end of the block; yield whether it waits."""
    waits, answers = threading.Event(), threading.Event()
    with when_opened(path, lambda: (waits.set(), answers.wait(250))):
        try:
            yield waits
            assert waits.wait(250)
        finally:
            answers.set()


def fail_to_read(path: Path) -> bytes:
    """Fail as a disk does, in the place of what reads a file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
