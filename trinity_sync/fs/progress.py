"""How far a long read or copy is, told to whoever waits for it; what is told is shown elsewhere."""

from collections.abc import Callable

Meter = Callable[[int, int], object]
"""Called, from any thread, with what was done since the last call and with how much it is in all.

Bytes, unless the function that takes a meter says otherwise. What turns out to be done already
counts, so that the calls of a whole run come close to the whole; they need not meet it.
"""


def unmetered(done: int, whole: int = 0) -> None:
    """For who does not want to know."""
