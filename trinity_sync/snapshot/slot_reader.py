"""The weights' reader's side of a slot: mapped once, locked for each version that it copies.

A new mapping costs more than the copy from one that is there, and slots are used again and again,
so a reader keeps the mapping and takes the lock. The lock is shared with other readers, and never
waited for: who fills the slot has it alone, and then the version that was looked for is gone.

A child that is forked has no part in the lock (see ``flock``), and keeps what it has mapped.
"""

import os
import warnings
from pathlib import Path

import torch

from trinity_sync.fs.flock import LockFile
from trinity_sync.snapshot.version_tag import Published, published_in


class MappedSlot:
    """The file at ``path``, mapped read-only as soon as it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = torch.empty(0, dtype=torch.uint8)
        """The bytes; not to be written to, and those of a version under the lock only."""
        self._file: LockFile | None = None
        self._readings: list[LockFile] = []
        """The file of each reading: a reader may read within a reading."""

    def try_lock(self, image: str) -> Published | None:
        """Share the lock if the slot holds ``image``; what its note says, None if it is gone.

        Raises:
            FormatError: another release has written the note.
        """
        try:
            file = self._open()
            if not file.try_acquire(shared=True):
                return None
        except FileNotFoundError:
            return None
        self._readings.append(file)
        published = None
        try:
            published = published_in(self.path)
            if published and (published.image != image or not self._map(file, published.nbytes)):
                published = None
        finally:
            if published is None:
                self.unlock()
        return published

    def unlock(self) -> None:
        """Give the lock back; the file is unlocked by its last reading."""
        file = self._readings.pop()
        if file not in self._readings:  # those of a parent are of its file
            file.release()

    def close(self) -> None:
        """Let go of the file, and so of its lock; the memory goes with its last view."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file:
            self._file.close()
            self._file = None

    def _open(self) -> LockFile:
        """Open the file that has the slot's name now: a trainer may have removed the old one."""
        found = self.path.lstat()
        known = self._file
        if known and known.fd >= 0 and os.path.samestat(found, os.fstat(known.fd)):
            return known  # else it is the parent's, or another one
        self.close()
        self._file = LockFile(self.path, os.O_RDONLY)
        return self._file

    def _map(self, file: LockFile, nbytes: int) -> bool:
        """Whether the file has ``nbytes`` bytes; it is mapped again if it has grown."""
        size = os.fstat(file.fd).st_size
        if size < nbytes:  # it was cut short: to read what is mapped beyond is a bus error
            return False
        if len(self.memory) < nbytes:
            self.memory = read_only(memoryview(file.map(size, populate=True)))
        return True


def read_only(content: memoryview) -> torch.Tensor:
    """Bytes that nobody may write to, as a ``uint8`` tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it could not hinder anybody
        return torch.frombuffer(content, dtype=torch.uint8)
