"""A speed limit that all processes of a node share.

A node's checkpoints are written by several Ray processes with several threads each, none of which
knows how many others write. So they share a file with the time until which the admitted bytes are
paid for. The holder of its lock waits for that time and admits the next bytes.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from trinity_sync.fs.atomic import open_fd

logger = logging.getLogger(__name__)

LARGEST = 16 << 20
"""Most bytes that are admitted at a time."""
_PAID_AT = struct.Struct("<d")


class RateLimit:
    """A limit of bytes per second for everything that uses the same file.

    The file lies in memory, in a folder of this user, and is created if it is missing. ``clock``
    returns monotonic seconds, the same for all processes of the node.
    """

    def __init__(
        self,
        path: Path,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._path, self._bytes_per_s = path, bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._warned = False

    def admit(self, nbytes: int) -> None:
        """Wait until bytes, at most `LARGEST`, may be written, and count them.

        Without its file, as in a full spool, there is no limit: a write does not fail for it.
        """
        try:
            self._admit(nbytes)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("writing without a speed limit: %s", error)

    def _admit(self, nbytes: int) -> None:
        with open_fd(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            now = self._clock()
            content = os.pread(fd, _PAID_AT.size, 0)
            paid_at = _PAID_AT.unpack(content)[0] if len(content) == _PAID_AT.size else now
            # a file from before a reboot, or written with a lower limit, has a time far ahead
            wait_s = min(paid_at - now, LARGEST / self._bytes_per_s)
            if wait_s > 0:
                self._sleep(wait_s)
                now += wait_s
            os.pwrite(fd, _PAID_AT.pack(now + nbytes / self._bytes_per_s), 0)
