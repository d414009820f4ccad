"""Progress of long reads and copies, as the callback of whoever shows it."""

from collections.abc import Callable

OnProgress = Callable[[int, int], object]
"""Called from any thread with what was done since the last call, and with the total.

Both are in bytes unless the function that takes the callback says otherwise. What turns out to be
done already counts, so the calls of a complete run add up to about the total.
"""


def no_progress(done: int, total: int = 0) -> None:
    """Ignore the progress."""
