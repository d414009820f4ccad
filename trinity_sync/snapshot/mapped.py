"""The weights' reader's side of a slot: mapped once, locked for each version that it copies.

A new mapping costs more than the copy from one that is there, and slots are used again and again,
so a reader keeps the mapping and takes the lock. The lock is shared with other readers, and never
waited for: who fills the slot has it alone, and then the version that was looked for is gone.

A lock belongs to an open file, which a child that is forked has, too, and could keep or give back.
So the child closes it, and what is mapped is a file that was opened once more.
"""

import fcntl
import mmap
import os
import warnings
import weakref
from pathlib import Path

import torch

from trinity_sync.snapshot.published import Published, published_in

_all: "weakref.WeakSet[MappedSlot]" = weakref.WeakSet()


class MappedSlot:
    """The file at ``path``, mapped read-only as soon as it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = torch.empty(0, dtype=torch.uint8)
        """The bytes; not to be written to, and those of a version under the lock only."""
        self._fd = -1
        self._locks = 0
        """How often it was locked and not given back: a reader may read within a reading."""
        _all.add(self)

    def try_lock(self, image: str) -> Published | None:
        """Share the lock if the slot holds ``image``; what its note says, None if it is gone."""
        try:
            self._open()
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None
        self._locks += 1
        published = published_in(self.path)
        if published and published.image == image and self._map(published.nbytes):
            return published
        self.unlock()
        return None

    def unlock(self) -> None:
        """Give the lock back; the file is unlocked by the last."""
        self._locks -= 1
        if not self._locks and self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file; the memory goes with its last view."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.close_file()

    def close_file(self) -> None:
        """Let go of the file, and so of its lock, but for processes that have it, too."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the file that has the slot's name now: a trainer may have removed the old one."""
        found = self.path.lstat()
        if self._fd >= 0 and os.path.samestat(found, os.fstat(self._fd)):
            return
        self.close()
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _map(self, nbytes: int) -> bool:
        """Whether the file has ``nbytes`` bytes; it is mapped again if it has grown."""
        size = os.fstat(self._fd).st_size
        if (
            size < nbytes
        ):  # it was cut short, and reading what is mapped beyond would be a bus error
            return False
        if len(self.memory) < nbytes:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            with Path(f"/proc/self/fd/{self._fd}").open("rb") as again:
                content = mmap.mmap(again.fileno(), size, flags, mmap.PROT_READ)
            self.memory = read_only(memoryview(content))
        return True


def _leave_to_parent() -> None:
    for slot in _all:
        slot.close_file()


os.register_at_fork(after_in_child=_leave_to_parent)


def read_only(content: memoryview) -> torch.Tensor:
    """Bytes that nobody may write to, as a ``uint8`` tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it could not hinder anybody
        return torch.frombuffer(content, dtype=torch.uint8)
