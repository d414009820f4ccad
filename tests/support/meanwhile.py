"""Something that happens in the middle of another: when a file is opened or renamed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.path_calls import follow_fd

_waiting: dict[tuple[str, str], Callable[[], object]] = {}


def _look(event: str, arguments: tuple[object, ...]) -> None:
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
