"""A file system (FUSE) that passes all operations on to a folder, except for those that it refuses.

Real mounts of object stores and of other nodes' disks lack some operations and do others in part.
A test says which: ``python -m tests.support.restricted FOLDER MOUNT NAME rename link ...``.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def restricted(folder: Path, *refused: str, called: str = "passing") -> Iterator[Path]:
    """A mount of type ``fuse.{called}`` that refuses what is named.

    ``rename``: of folders; ``copy``: a rename makes a copy of a file; ``link``, ``flock``,
    ``range`` (locks of bytes), ``direct``, ``fsyncdir``.
    """
    pytest.importorskip("mfusepy", reason="there is no libfuse", exc_type=(ImportError, OSError))
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse")
    source, mount = folder / "source", folder / "mount"
    source.mkdir()
    mount.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.support.restricted",
        str(source),
        str(mount),
        called,
        *refused,
    ]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not mount.is_mount():
            if server.poll() is not None:
                pytest.skip(f"FUSE cannot be mounted here: {server.stderr.read()}")
            time.sleep(0.01)
        yield mount
    finally:
        for unmount in (
            ["umount", mount],
            ["fusermount3", "-u", mount],
            ["fusermount", "-u", mount],
        ):
            try:
                subprocess.run(unmount, check=True, capture_output=True)
                break
            except (OSError, subprocess.CalledProcessError):
                continue
        server.wait(250)
        server.stderr.close()


def main() -> None:
    """Mount, and serve until it is unmounted."""
    from mfusepy import FUSE, FuseOSError, Operations

    source, mount, called, *refused = sys.argv[1:]

    def refuse(what: str, code: int) -> None:
        if what in refused:
            raise FuseOSError(code)

    class Passing(Operations):  # type: ignore[misc]
        use_ns = True

        def _at(self, path: str) -> Path:
            return Path(source + path)

        def init_with_config(self, conn_info: Any, config: Any) -> None:
            if config is not None:
                config.use_ino = 1
                config.entry_timeout = config.attr_timeout = config.negative_timeout = 0

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = self._at(path).lstat()
            names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size")
            times = {f"st_{t}time": getattr(found, f"st_{t}time_ns") for t in "amc"}
            return {name: getattr(found, name) for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(entry.name for entry in self._at(path).iterdir())]

        def mkdir(self, path: str, mode: int) -> None:
            self._at(path).mkdir(mode)

        def rmdir(self, path: str) -> None:
            self._at(path).rmdir()

        def unlink(self, path: str) -> None:
            self._at(path).unlink()

        def rename(self, old: str, new: str) -> None:
            if self._at(old).is_dir():
                refuse("rename", errno.ENOTSUP)
            elif "copy" in refused:  # as stores do that have no rename
                self._at(new).unlink(missing_ok=True)
                self._at(new).write_bytes(self._at(old).read_bytes())
                self._at(old).unlink()
                return
            self._at(old).rename(self._at(new))

        def link(self, target: str, source: str) -> None:
            refuse("link", errno.ENOSYS)
            os.link(self._at(source), self._at(target))

        def chmod(self, path: str, mode: int) -> None:
            self._at(path).chmod(mode)

        def utimens(self, path: str, times: Any = None) -> None:
            os.utime(self._at(path), ns=times)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            os.truncate(self._at(path), length)

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(self._at(path))
            names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_frsize")
            return {name: getattr(found, name) for name in names}

        def open(self, path: str, fi: Any) -> int:
            if fi.flags & os.O_DIRECT:
                refuse("direct", errno.EINVAL)
            fi.fh = os.open(self._at(path), fi.flags & ~(os.O_DIRECT | os.O_APPEND))
            return 0

        def create(self, path: str, mode: int, fi: Any) -> int:
            if fi.flags & os.O_DIRECT:
                refuse("direct", errno.EINVAL)
            fi.fh = os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)
            return 0

        def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
            return os.pread(fi.fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
            return os.pwrite(fi.fh, data, offset)

        def release(self, path: str, fi: Any) -> None:
            os.close(fi.fh)

        def fsync(self, path: str, datasync: int, fi: Any) -> None:
            os.fsync(fi.fh)

        def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
            refuse("fsyncdir", errno.EIO)

    if "flock" in refused:

        def flock(self: Any, path: str, fi: Any, op: int) -> None:
            raise FuseOSError(errno.ENOLCK)

        Passing.flock = flock
    if "range" in refused:

        def lock(self: Any, path: str, fi: Any, command: int, lock: Any) -> int:
            raise FuseOSError(errno.ENOLCK)

        Passing.lock = lock
    FUSE(Passing(), mount, foreground=True, nothreads=True, raw_fi=True, subtype=called)


if __name__ == "__main__":
    main()
