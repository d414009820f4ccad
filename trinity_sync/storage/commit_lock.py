"""The lock that keeps two changes of a root's committed steps apart.

Whoever takes both locks takes this one first and that of ``claims.nobody_claims`` second.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.durable import make_folder


@contextmanager
def one_change_at_a_time(root: str | Path) -> Iterator[None]:
    """Wait for the commits and rewinds of other processes and threads; then nobody else's begin."""
    folder = Path(root) / PRIVATE_FOLDER
    make_folder(folder)
    with (folder / "commit.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
