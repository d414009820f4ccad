"""Counts the calls of this process that look up a path: stats, opens and listings of folders."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Tell = Callable[[str, str], object]
"""Called with ``stat``, ``open`` or ``list``, and the path."""

_told: list[tuple[tuple[str, ...], Tell]] = []
_EVENTS = {"open": "open", "os.scandir": "list", "os.listdir": "list"}


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _told and event in _EVENTS:
        _on_call(_EVENTS[event], arguments[0])


def _on_call(kind: str, path: Any) -> None:
    if not isinstance(path, int) and path is not None:  # calls on what is open look nothing up
        name = follow_fd(os.fsdecode(path))
        for below, tell in _told:
            if name.startswith(below):
                tell(kind, name)


def follow_fd(path: str) -> str:
    """Return the path of a name in an open folder, ``/proc/self/fd/7/name``; others as they are."""
    fd, _, name = path.removeprefix("/proc/self/fd/").partition("/")
    if not (path.startswith("/proc/self/fd/") and name):
        return path
    return f"{os.readlink(f'/proc/self/fd/{fd}')}/{name}"  # noqa: PTH115, which others count


sys.addaudithook(_on_event)  # it stays until the process ends


@contextmanager
def watch_path_calls(tell: Tell, *below: Path) -> Iterator[None]:
    """Tell of each call for a path below some folders just before it is made, in any thread."""
    stat, lstat, told = os.stat, os.lstat, (tuple(map(str, below)), tell)

    def counted_stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        _on_call("stat", path)
        return stat(path, *args, **options)

    def counted_lstat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        _on_call("stat", path)
        return lstat(path, *args, **options)

    os.stat, os.lstat = counted_stat, counted_lstat
    _told.append(told)
    try:
        yield
    finally:
        _told.remove(told)
        os.stat, os.lstat = stat, lstat
