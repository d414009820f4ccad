"""Something that happens in the middle of another thing: right when a file is opened."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_waiting: dict[str, Callable[[], object]] = {}


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _waiting and (body := _waiting.pop(str(arguments[0]), None)):
        body()


sys.addaudithook(_look)  # it stays until the process ends


@contextmanager
def when_opened(path: Path, body: Callable[[], object]) -> Iterator[None]:
    """Call ``body`` once, the instant before this process opens ``path`` for the first time."""
    _waiting[str(path)] = body
    yield
    assert not _waiting, f"{path} was not opened"
