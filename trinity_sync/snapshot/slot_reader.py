"""A slot as a weight reader uses it: mapped once, locked for each version that is copied.

A new mapping costs more than a copy from an existing one, and slots are reused, so a reader keeps
the mapping and acquires the lock for each read. The lock is shared with other readers and is never
waited for: while a trainer fills the slot, the version that the reader looks for is gone.

A forked child does not share the lock (see ``fs.lock_file``), and keeps its mappings.
"""

import os
import warnings
from pathlib import Path

import torch

from trinity_sync.fs.lock_file import LockFile
from trinity_sync.snapshot.version_tag import VersionTag, read_version_tag


class SlotReader:
    """The file at ``path``, mapped read-only at the first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The slot's bytes, ``uint8`` and read-only; those of a version under the lock only."""
        self._file: LockFile | None = None
        self._readings: list[LockFile] = []
        """The file of each read in progress; reads may nest."""

    def try_lock(self, image: str) -> VersionTag | None:
        """Acquire the shared lock if the slot holds ``image``; return its version tag, or None.

        Raises:
            FormatError: another release has written the tag.
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
            published = read_version_tag(self.path)
            if published and (published.image != image or not self._map(file, published.nbytes)):
                published = None
        finally:
            if published is None:
                self.unlock()
        return published

    def unlock(self) -> None:
        """Release the lock of one read; the last one unlocks the file."""
        file = self._readings.pop()
        if file not in self._readings:  # a parent process has its own
            file.release()

    def close(self) -> None:
        """Close the file and release its lock; the memory is unmapped with its last view."""
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._file:
            self._file.close()
            self._file = None

    def _open(self) -> LockFile:
        """Open the file that has the slot's name now: a trainer may have replaced it."""
        found = self.path.lstat()
        known = self._file
        if known and known.fd >= 0 and os.path.samestat(found, os.fstat(known.fd)):
            return known  # otherwise it is the parent's, or was replaced
        self.close()
        self._file = LockFile(self.path, os.O_RDONLY)
        return self._file

    def _map(self, file: LockFile, nbytes: int) -> bool:
        """Return whether the file has ``nbytes`` bytes, and map it again if it has grown."""
        size = os.fstat(file.fd).st_size
        if size < nbytes:  # truncated: reading a mapping beyond the end is a bus error
            return False
        if len(self.memory) < nbytes:
            self.memory = view_read_only(memoryview(file.map(size, populate=True)))
        return True


def view_read_only(content: memoryview) -> torch.Tensor:
    """Return read-only bytes as a ``uint8`` tensor, without a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor is not writable
        return torch.frombuffer(content, dtype=torch.uint8)
