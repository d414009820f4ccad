"""A disk that hangs, for real: a file system (FUSE) whose server answers no request."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """Within the block, every call that touches a folder or what is in it hangs.

    After it, the calls fail, as those of a file server that is given up, and the folder is back.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"there is no /dev/fuse: {error}")
    try:
        options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if libc.mount(b"hanging", os.fsencode(folder), b"fuse", 0, options.encode()):
            pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(folder), _MNT_DETACH)
    finally:
        os.close(server)
