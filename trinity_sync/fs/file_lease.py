"""Exclusive use of a file, determined by a write lease of the kernel."""

import fcntl
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trinity_sync.fs.atomic import open_fd

_F_SETOWN_EX, _F_OWNER_TID = 15, 0
"""Constants of Linux's fcntl.h: set the owner of an open file's signals; the owner is a thread."""


def has_no_other_users(path: Path) -> bool:
    """Return whether a file has no other name and no other process has it open or mapped.

    The kernel grants a write lease only then.
    """
    try:
        with open_fd(path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            if os.fstat(fd).st_nlink > 1:
                return False
            with ThreadPoolExecutor(1, "lease") as thread:
                return thread.submit(_can_be_leased, fd).result()
    except OSError:
        return False


def _can_be_leased(fd: int) -> bool:
    """Return whether the kernel grants a write lease of a file. Call it in a thread of its own.

    If a process opens the file while it is leased, the kernel sends a SIGIO, which ends a process
    that does not handle it. It is sent to this thread only, which blocks the signal and then ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    owner = struct.pack("ii", _F_OWNER_TID, threading.get_native_id())
    fcntl.fcntl(fd, _F_SETOWN_EX, owner)  # otherwise the lease makes the process the owner
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
