"""The settings of a Ray process, which runs hundreds of functions with the same ones."""

import os
from functools import lru_cache

from trinity_sync.settings import Settings, StackSettings


def read_settings() -> tuple[Settings, StackSettings]:
    """Return the settings of this process, which are read again if its environment has changed.

    Reading them takes 5 ms, more than the other work of a small file.
    """
    return _read(frozenset(os.environ.items()))


@lru_cache(maxsize=2)
def _read(_environment: frozenset[tuple[str, str]]) -> tuple[Settings, StackSettings]:
    return Settings(), StackSettings()
