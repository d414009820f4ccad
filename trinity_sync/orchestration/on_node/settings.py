"""The settings of a Ray process, which runs hundreds of functions with the same ones."""

import os
from functools import lru_cache

from trinity_sync.pipeline.save import NodeWriting
from trinity_sync.settings import Settings, StackSettings


def read_settings() -> tuple[Settings, StackSettings]:
    """Return the settings of this process, which are read again if its environment has changed.

    Reading them takes 5 ms, more than the other work of a small file.
    """
    return _read(frozenset(os.environ.items()))


def read_writing() -> NodeWriting:
    """Return how this node writes."""
    return NodeWriting.of(read_settings()[1])


@lru_cache(maxsize=2)
def _read(_environment: frozenset[tuple[str, str]]) -> tuple[Settings, StackSettings]:
    return Settings(), StackSettings()
