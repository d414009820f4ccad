"""Waiting for what comes about by itself."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 250.0
"""Seconds within which any machine has come about it, before pytest ends the test."""


def until(
    ask: Callable[[], T | None], what: str, timeout: float = WAIT_S, *, pause: float = 0.1
) -> T:
    """Ask until there is an answer."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(pause)
    raise AssertionError(f"waited {timeout} s for {what}")
