"""Progress callbacks of long reads and copies."""

from collections.abc import Callable

OnProgress = Callable[[int, int], object]
"""Called from any thread with the amount since the last call, and the total.

Both are in bytes unless the function that takes the callback says otherwise. Work that turns out to
be done already counts, so the amounts of a complete run add up to about the total.
"""


def no_progress(done: int, total: int = 0) -> None:
    """Ignore the progress."""
