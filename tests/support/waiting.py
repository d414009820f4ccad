"""Waiting for what comes about by itself."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(ask: Callable[[], T | None], what: str, timeout: float = 90, *, pause: float = 0.1) -> T:
    """Ask until there is an answer."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(pause)
    raise AssertionError(f"waited {timeout} s for {what}")
