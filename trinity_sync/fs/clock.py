"""What time it is for the files of a root.

Leases and the like begin at the time that their file got from the file system, perhaps a file
server's. A node whose own clock is ahead must not take them for ended.
"""

import time
from pathlib import Path

from trinity_sync.layout import PRIVATE_FOLDER


def file_time(root: str | Path) -> float:
    """Now, in seconds since the epoch, by the clock that gives files in a root their times.

    Where nothing may be written, this node's clock has to do.
    """
    path = Path(root) / PRIVATE_FOLDER / ".now"
    try:
        path.touch()
        return path.stat().st_mtime
    except OSError:
        return time.time()
