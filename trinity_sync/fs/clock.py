"""Clock of the file system of a root, which may be the clock of a file server.

Leases begin at the mtime of their files, so the clock of a node that is ahead must not end them.
"""

import time
from pathlib import Path

from trinity_sync.layout import PRIVATE_FOLDER


def read_file_system_time(root: str | Path) -> float:
    """Return the current time of a root's file system, in seconds since the epoch.

    If the root cannot be written, it is the time of this node.
    """
    path = Path(root) / PRIVATE_FOLDER / ".now"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
