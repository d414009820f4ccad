"""The trainer's side of a slot: a reusable place for one image in shared memory.

Touching fresh shared memory costs fifty times a copy into memory that is mapped already, so a slot
only ever grows, is never truncated, and stays mapped as long as its process lives. Whoever fills a
slot holds its lock alone, whoever reads it shares it: nobody sees an image that changes under them,
and a trainer never waits for a lock of a process that died.

A job that is started again uses the slots of the process before, which may not have ended yet. So
whoever keeps a slot shares a second lock on its file, and only the last of them removes it. For the
same reason the last bytes of the file name the last filling. They are written before any other byte
changes, and compared under the lock before a process uses anything that it remembers of the slot.

The file may also be removed or cut short by something that takes no lock. So under the lock it is
compared with its name and its mapping; a file that is gone is made again.
"""

import errno
import fcntl
import logging
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path

import torch

from trinity_sync.errors import SpoolFullError
from trinity_sync.fs.flock import LockFile
from trinity_sync.snapshot.image import Layout
from trinity_sync.snapshot.slot_cache import forget
from trinity_sync.snapshot.ticket import Ticket, failure_path, ticket_path
from trinity_sync.snapshot.version_tag import published_path, withdraw

logger = logging.getLogger(__name__)

REMOVE_S = 60.0
"""Seconds in which another process has removed a slot that it had begun to remove."""
_ROUND_TO = 2 << 20  # grow in 2 MiB pieces, so that small changes of a state need no new mapping
_NAME = 64  # bytes at the end of the file for the name of its last filling


class Slot:
    """The file at ``path``, mapped and kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.laid_out: Layout | None = None
        """The layout whose headers are in place; valid under the lock."""
        self.holds: Ticket | None = None
        """Ticket of the image that this process laid out here, sealed or not; likewise."""
        self._filled = b""
        """Name of this process's last filling, as written to the end of the file."""
        self._image = torch.empty(0, dtype=torch.uint8)
        self._pinned = self._cannot_pin = False
        self._ours = threading.Lock()
        self._file = _kept(path)

    @property
    def free(self) -> bool:
        """Whether no sealed image waits in the slot."""
        return not ticket_path(self.path).exists()

    @property
    def has_file(self) -> bool:
        """Whether the locked file still has the slot's name."""
        return _is_named(self._file, self.path)

    @property
    def fd(self) -> int:
        """Descriptor of the locked file."""
        return self._file.fd

    @property
    def published(self) -> bool:
        """Whether readers have been told of what the slot holds."""
        return published_path(self.path).exists()

    @property
    def failed(self) -> bool:
        """Whether the save of the image in the slot is known to have failed."""
        return failure_path(self.path).exists()

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take the lock if nobody holds it, nor another thread of this process.

        `laid_out` and `holds` are dropped if another process has filled the slot since.

        Args:
            shared: with the slot's readers, so that its bytes stay. A file that is gone is then not
                made again.
        """
        if not self._ours.acquire(blocking=False):
            return False
        locked = False
        try:
            locked = self._lock_file(shared)
        finally:
            if not locked:
                self._ours.release()
        return locked

    def _lock_file(self, shared: bool) -> bool:
        while True:
            if self._file.fd < 0:
                if shared:
                    return False
                self._pinned = False  # in a forked child it was the parent's that was
                self._unmap()
                self._file = _kept(self.path)
            if not self._file.try_acquire(shared=shared):
                return False
            if self.has_file:
                self._recall()
                return True
            self._lose_file()

    def _recall(self) -> None:
        """Drop what this process remembers of the slot if another has filled or resized it."""
        fd, count = self._file.fd, len(self._filled)
        size = os.fstat(fd).st_size
        if len(self._image) != size:
            self._unmap()
        if not count or os.pread(fd, count, max(0, size - count)) != self._filled:
            self.laid_out = self.holds = None

    def _lose_file(self) -> None:
        """Close and unmap the file; `try_lock` opens the one that has the slot's name then."""
        self._unmap()
        self._file.close()
        self.holds = None

    def unlock(self) -> None:
        """Give the lock back."""
        self._file.release()
        self._ours.release()

    def begin(self, name: str, nbytes: int) -> torch.Tensor:
        """As `image`, for a filling of this random name; call it under the exclusive lock.

        From here on no process uses what the slot held, also if this one dies at once.
        """
        self._take_back()
        self.holds = None
        memory = self.image(nbytes)
        self._filled = name.encode()
        os.pwrite(self._file.fd, self._filled, len(memory) - len(self._filled))
        return memory

    def _take_back(self) -> None:
        """Remove the notes that say what the bytes are."""
        forget(self.path)
        withdraw(self.path)

    def image(self, nbytes: int) -> torch.Tensor:
        """The slot's memory as a ``uint8`` tensor with room for an image of ``nbytes`` bytes.

        Raises:
            SpoolFullError: the spool has no room for so many bytes; nothing was changed.
        """
        fd = self._file.fd
        size = max(-(-(nbytes + _NAME) // _ROUND_TO) * _ROUND_TO, os.fstat(fd).st_size)
        if len(self._image) != size:
            allocate(fd, self.path, size)
            self._unmap()
            # the view keeps its mapping alive; the old one goes with the old view
            memory = self._file.map(size, writable=True, populate=True)
            self._image = torch.frombuffer(memory, dtype=torch.uint8)
        return self._image

    def _unmap(self) -> None:
        self._unpin()
        self._image = torch.empty(0, dtype=torch.uint8)
        self.laid_out = None

    def pin(self) -> None:
        """Page-lock the mapped memory, once, so that CUDA copies into it at full speed."""
        if self._pinned or self._cannot_pin:
            return
        address, size = self._image.data_ptr(), len(self._image)
        failed = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failed:
            logger.warning(
                "%s cannot be pinned (CUDA error %d); copies are slow", self.path, failed
            )
            self._cannot_pin = True
            with suppress(RuntimeError):  # CUDA tells of it again at the next kernel: at this one
                torch.ones(1, device="cuda")
        self._pinned = not failed

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._image.data_ptr())
            self._pinned = False

    def close(self, *, remove: bool) -> None:
        """Unmap the slot; with ``remove``, delete its file too, if no sealed image is in it.

        In a forked child the slot is the parent's, and stays.
        """
        if self._file.fd < 0:
            return
        self._unmap()
        # who reads it may do so to its end, and a process that was started meanwhile keeps it
        unused = remove and self._file.try_acquire(shared=True) and self.free
        if unused and _keep(self._file, fcntl.F_WRLCK) and self.has_file:
            self._take_back()
            self.path.unlink(missing_ok=True)
        self._file.close()


def _kept(path: Path) -> LockFile:
    """The file at ``path``, made if need be, with a share in the lock of those who keep it."""
    while True:
        file = LockFile(path, os.O_RDWR | os.O_CREAT)
        file.wait(lambda file=file: _keep(file, fcntl.F_RDLCK), REMOVE_S)  # type: ignore[misc]
        if _is_named(file, path):  # otherwise it was removed just now
            return file
        file.close()


def _is_named(file: LockFile, path: Path) -> bool:
    """Whether the path leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file.fd), path.lstat())
    except FileNotFoundError:
        return False


def _keep(file: LockFile, how: int) -> bool:
    """Take the lock of those who keep a slot, which has nothing to do with flock's; if it is free.

    Like flock's it belongs to the open file.
    """
    whole_file = struct.pack("hhqqi4x", how, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
    try:
        fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, whole_file)
    except BlockingIOError:
        return False
    return True


def allocate(fd: int, path: Path, size: int) -> None:
    """Reserve ``size`` bytes for the slot, so that touching them cannot fail later.

    Raises:
        SpoolFullError: there is no room.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        room = os.statvfs(path.parent)
        have = os.fstat(fd).st_blocks * 512
        raise SpoolFullError(
            f"spool {path.parent} has no room for slot {path.name}: it needs {size - have:,} "
            f"more bytes and {room.f_bavail * room.f_frsize:,} are free. Enlarge it (mount -o "
            "remount,size=... /dev/shm, or --shm-size of the container), or set "
            "TRINITY_SYNC_SPOOL to another folder in memory, or TRINITY_SYNC_SLOTS=1."
        ) from error
