"""A slot as a trainer uses it: a reusable place for one image in shared memory.

Touching fresh shared memory costs several copies into mapped memory, so a slot only grows and stays
mapped as long as its process lives, unless saves do without it for long. The trainer fills it under
the exclusive lock, readers share the lock: no reader sees an image change, and the lock of a
process that died is released by the kernel.

A job that is started again uses the slots of its previous process, which may not have ended yet. So
each process that uses a slot shares a second lock on its file, and only the last one removes the
file. For the same reason the last bytes of the file name the image that fills it. They are written
before any other byte changes, and are compared under the lock before a process relies on what it
knows of the slot.

A program that takes no lock may remove or truncate the file. So the file is compared with its name
and its mapping under the lock, and is created again if it is gone.
"""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from trinity_sync.errors import SpoolFullError
from trinity_sync.fs.atomic import NO_ROOM
from trinity_sync.fs.file_system import find_room
from trinity_sync.fs.locks import LockFile
from trinity_sync.snapshot.image import Layout
from trinity_sync.snapshot.spool import JobSpool, remove_replaced_spools
from trinity_sync.snapshot.ticket import (
    Ticket,
    failure_path,
    is_named,
    remove_records,
    ticket_path,
    try_remove_slot,
    version_tag_path,
)
from trinity_sync.tensors.memcpy import CAN_MAP_PAGES, map_image, map_pages

logger = logging.getLogger(__name__)

REMOVE_S = 60.0
"""Seconds to wait for another process that is removing the slot."""
_ROUND_TO = 2 << 20  # grow by 2 MiB, so that a state that grows a little needs no new mapping
_PART = 4 << 20  # bytes between two looks at whether a save needs the slot
_RESERVE = 64 << 20  # the same while memory is reserved
_NAME = 64  # bytes at the end of the file for the name of the image


class Slot:
    """The slot file at ``path``, created if it is missing and kept mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ticket, self._tag = ticket_path(path), version_tag_path(path)
        self.laid_out: Layout | None = None
        """Layout whose headers the slot holds; valid under the lock."""
        self.holds: Ticket | None = None
        """Ticket of the image that this process laid out here; valid under the lock."""
        self._filled = b""
        """Name of the last image of this process, as written to the end of the file."""
        self._image = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.is_mapped = False
        """Whether all pages of the memory are mapped, or as many as a copy needs."""
        self._pinned = self._cannot_pin = False
        self._ours = threading.Lock()
        self.file = _kept(path)
        """The slot's file and its lock."""

    @property
    def free(self) -> bool:
        """Whether the slot holds no sealed image."""
        return not self._ticket.exists()

    @property
    def published(self) -> bool:
        """Whether the slot holds a published version of the weights."""
        return self._tag.exists()

    @property
    def reserved(self) -> int:
        """Bytes of memory that are reserved for the slot."""
        return os.fstat(self.file.fd).st_blocks * 512 if self.file.fd >= 0 else 0

    @property
    def failed(self) -> bool:
        """Whether the save of the image in the slot is known to have failed."""
        return failure_path(self.path).exists()

    def try_lock(self, *, shared: bool = False) -> bool:
        """Acquire the lock if no process and no other thread holds it; return whether it did.

        It resets `laid_out` and `holds` if another process has filled the slot since. A ``shared``
        lock is that of readers, under which the bytes cannot change; for it a file that is gone is
        not created again.
        """
        if not self._ours.acquire(blocking=False):
            return False
        locked = False
        try:
            while not locked and (self.file.fd >= 0 or not shared):
                if self.file.fd < 0:
                    self._pinned = False  # a forked child inherits no pinned memory
                    self._unmap()
                    self.file = _kept(self.path)
                if not self.file.try_acquire(shared=shared):
                    break
                if is_named(self.file, self.path):
                    self._recall()
                    locked = True
                else:  # the next pass opens the file with the slot's name
                    self._unmap()
                    self.file.close()
                    self.holds = None
        finally:
            if not locked:
                self._ours.release()
        return locked

    def _recall(self) -> None:
        """Forget the slot's content if another process has filled or resized it."""
        fd, count = self.file.fd, len(self._filled)
        size = os.fstat(fd).st_size
        if len(self._image) != size:
            self._unmap()
        if not count or os.pread(fd, count, max(0, size - count)) != self._filled:
            self.laid_out = self.holds = None

    def unlock(self) -> None:
        """Release the lock."""
        self.file.release()
        self._ours.release()

    def begin(self, name: str, nbytes: int) -> torch.Tensor:
        """Return the memory as `image` does, to be filled with an image of this random name.

        Call it under the exclusive lock. From here on no process uses the earlier content, even if
        this process dies at once.
        """
        remove_records(self.path)
        self.holds = None
        memory = self.image(nbytes)
        self._filled = name.encode()
        os.pwrite(self.file.fd, self._filled, len(memory) - len(self._filled))
        return memory

    def image(self, nbytes: int, ended: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Return the slot's memory as a ``uint8`` tensor with at least ``nbytes`` elements.

        Once ``ended`` is true, it is the memory that it has. Pages of new memory are mapped by
        `touch`, or by whoever writes to them first.

        Raises:
            SpoolFullError: the spool has no room for it; nothing was changed.
        """
        size = -(-(nbytes + _NAME) // _ROUND_TO) * _ROUND_TO
        size = max(size, os.fstat(self.file.fd).st_size)
        if len(self._image) != size and allocate_slot(self.file.fd, self.path, size, ended):
            self._unmap()
            # a mapping lives as long as its last view
            memory = self.file.map(size, writable=True, populate=not CAN_MAP_PAGES)
            self._image = torch.frombuffer(memory, dtype=torch.uint8)
            self.is_mapped = not CAN_MAP_PAGES
        return self._image

    def touch(self, nbytes: int | None, ended: Callable[[], bool]) -> None:
        """Make the memory of `image` fast to write, a part at a time, until ``ended`` is true.

        With None the memory that it has. It changes no byte, leaves the slot to readers, and holds
        no GIL for long. It does nothing if another process fills the slot.

        Raises:
            SpoolFullError: as `image`.
        """
        if nbytes is not None:
            if not self.try_lock():
                return
            try:
                self.image(nbytes, ended)
            finally:
                self.unlock()
        image = self._image
        for part in () if self.is_mapped else image.split(_PART):
            if ended() or not map_pages(part.data_ptr(), len(part)):
                return
        self.is_mapped = image is self._image and len(image) > 0
        if torch.cuda.is_initialized() and not self._pinned and self.try_lock(shared=True):
            try:
                self.pin()
            finally:
                self.unlock()

    def give_back(self, ended: Callable[[], bool]) -> None:
        """Return the memory of a free slot to the system, a part at a time, as in `touch`."""
        for size in reversed(range(0, os.fstat(self.file.fd).st_size, _PART)):
            if ended():
                break
            os.truncate(self.file.fd, size)  # unmaps the pages, without the GIL
        self._unmap()
        self.holds = None

    def _unmap(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._image.data_ptr())
            self._pinned = False
        self._image = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.is_mapped = False
        self.laid_out = None

    def pin(self) -> None:
        """Page-lock the mapped memory, once, for CUDA copies at full speed."""
        if not self.is_mapped:
            map_image(self._image)
            self.is_mapped = True
        if self._pinned or self._cannot_pin:
            return
        address, size = self._image.data_ptr(), len(self._image)
        failed = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failed:
            logger.warning(
                "%s cannot be pinned (CUDA error %d); copies are slow", self.path, failed
            )
            self._cannot_pin = True
            with suppress(RuntimeError):  # CUDA reports the error again at the next kernel: here
                torch.ones(1, device="cuda")
        self._pinned = not failed

    def close(self, *, remove: bool) -> None:
        """Unmap the slot; with ``remove``, as `try_remove_slot`, unless another thread uses it.

        In a forked child it does nothing: the slot is the parent's.
        """
        if self.file.fd < 0:
            return
        self._unmap()
        if remove and self._ours.acquire(blocking=False):
            try:
                try_remove_slot(self.file, self.path)
            finally:
                self._ours.release()
        self.file.close()


def _kept(path: Path) -> LockFile:
    """Open the file at ``path``, created if it is missing, and share the lock of its users."""
    while True:
        file = LockFile(path, os.O_RDWR | os.O_CREAT)
        file.wait(partial(file.try_acquire_range, fcntl.F_RDLCK), REMOVE_S)
        if is_named(file, path):  # otherwise it has just been removed
            return file
        file.close()


def allocate_slot(fd: int, path: Path, size: int, ended: Callable[[], bool]) -> bool:
    """Reserve memory for the slot, so that touching it cannot fail later.

    It takes as long as some copies, so it ends once ``ended`` is true. Return whether all is there.

    Raises:
        SpoolFullError: there is no room.
    """
    found = os.fstat(fd)
    have = found.st_blocks * 512
    if have >= size:
        return True
    remove_replaced_spools(JobSpool(path.parent), nbytes=size - have)
    try:
        for start in range(0, size, _RESERVE):
            if ended():
                return False
            room = find_room(path.parent)  # others take memory meanwhile
            if size - max(have, start) > room.nbytes:  # the kernel would end this process
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, start, min(_RESERVE, size - start))
    except OSError as error:
        os.truncate(fd, found.st_size)
        if error.errno not in NO_ROOM:
            raise
        raise SpoolFullError(
            f"spool {path.parent} has no room for slot {path.name}: it needs {size - have:,} "
            f"more bytes and {room.nbytes:,} are free. {room.enlarge}, or set TRINITY_SYNC_SPOOL "
            "to another folder in memory, or TRINITY_SYNC_SLOTS=1."
        ) from error
    return True
