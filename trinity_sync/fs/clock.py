"""The clock that gives the files of a root their times, which may be a file server's.

Leases begin at the time of their file. A node whose own clock is ahead must not take them for
ended.
"""

import time
from pathlib import Path

from trinity_sync.layout import PRIVATE_FOLDER


def read_file_system_time(root: str | Path) -> float:
    """Return the current time of a root's file system, in seconds since the epoch.

    Where the root cannot be written, it is the time of this node.
    """
    path = Path(root) / PRIVATE_FOLDER / ".now"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
