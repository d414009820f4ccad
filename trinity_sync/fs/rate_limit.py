"""A speed limit that all processes of a node share.

A node's checkpoints are written by several Ray processes, several threads in each. None of them
knows how many write at a time, so none could take its part of a limit. They share a file instead:
it has the time at which what was admitted last is paid for, and who holds its lock waits for that
time and admits the next bytes.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

LARGEST = 16 << 20
"""Bytes that are admitted at a time, at most."""
_PAID_AT = struct.Struct("<d")


class RateLimit:
    """A limit of bytes per second for everything that uses the same file.

    Args:
        path: File in memory, created if it is missing, in a folder of this user.
        bytes_per_s: The limit in bytes per second.
        clock: Monotonic seconds, the same for all processes of the node.
        sleep: Waits for some seconds.
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
        """Wait until bytes may be written, and count them.

        Without its file, as in a full spool, there is no limit: a write does not fail for it.

        Args:
            nbytes: Number of bytes, at most `LARGEST`.
        """
        try:
            self._admit(nbytes)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("writing without a speed limit: %s", error)

    def _admit(self, nbytes: int) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
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
        finally:
            os.close(fd)
