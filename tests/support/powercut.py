"""What a disk may hold after the power went, for every instant of some work on a folder.

A `Recording` looks at the whole folder before each call that changes a name in it, and at each
fsync, so that what happened in between is one change: a name that came or went, the bytes of a
file. Nothing is mocked but ``os.fsync``, which is passed on. From that, `cuts` derives what POSIX
lets a file system keep:

- Bytes are certain once their file was synced after them. Otherwise the file may have old or new
  bytes, half of each, zeros, or nothing.
- A name that came, went or changed is certain once its folder was synced after that. Otherwise it
  may have happened or not, each on its own, in no order. A rename within a folder, of a folder, and
  an exchange of two happen as a whole. A file that moves between folders may have both names for a
  while, never none.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from stat import S_ISDIR

import pytest

from benchmarks.path_calls import follow_fd

RECENT = 4
"""The last uncertain names, of which each combination of some sort is tried always."""
FATES = ("old", "new", "torn", "zeros", "any")
"""Of bytes that were not synced; ``any``: another one for each file."""
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate"}


@dataclass(frozen=True)
class Names:
    """Entries of folders that change together: folder, name, and what it names from now on."""

    entries: tuple[tuple[int, str, int | None], ...]
    needs: int | None = None
    """Number of another change without which this one cannot have happened."""

    @property
    def where(self) -> set[int]:
        return {folder for folder, _, _ in self.entries}


@dataclass(frozen=True)
class Bytes:
    file: int
    content: bytes

    @property
    def where(self) -> set[int]:
        return {self.file}


@dataclass(frozen=True)
class Synced:
    what: int


@dataclass
class Disk:
    """Folders and files by numbers of their own; those of folders are negative, 0 is the root."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def apply(self, change: "Names | Bytes | Synced") -> None:
        if isinstance(change, Bytes):
            self.files[change.file] = change.content
        elif isinstance(change, Names):
            for folder, name, node in change.entries:
                entries = self.folders.setdefault(folder, {})
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node

    def copy(self) -> "Disk":
        return Disk({each: dict(names) for each, names in self.folders.items()}, dict(self.files))

    def picture(self, folder: int = 0) -> tuple[object, ...]:
        """What can be seen of it: equal for disks that cannot be told apart."""
        return tuple(
            (name, self.picture(node) if node <= 0 else (node, self.files.get(node, b"")))
            for name, node in sorted(self.folders.get(folder, {}).items())
        )

    def build(self, path: Path) -> None:
        """Make it at ``path``, which must not exist."""
        made: dict[int, Path] = {}

        def build(folder: int, at: Path) -> None:
            at.mkdir()
            for name, node in self.folders.get(folder, {}).items():
                if node < 0:
                    build(node, at / name)
                elif node in made:
                    os.link(made[node], at / name)
                else:
                    (at / name).write_bytes(self.files.get(node, b""))
                    made[node] = at / name

        build(0, path)


class Recording:
    """The changes below ``root``, in their order, while it is `running`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changes: list[Names | Bytes | Synced] = []
        self.acknowledged: list[tuple[int, str]] = []
        """How many changes there had been when each part of the work was done, and which it was."""
        self.begin = Disk()
        self._seen = Disk()
        self._numbers: dict[tuple[int, bool], int] = {}
        self._given = 0
        self._on = threading.RLock()
        self._looking = True

    @contextmanager
    def running(self) -> Iterator["Recording"]:
        """Watch the work in the block; what is there before it counts as synced."""
        sys.addaudithook(self._heard)  # stays until the process ends, and says nothing after this
        fsync = os.fsync

        def record(fd: int) -> None:
            self.look()
            fsync(fd)
            found = os.fstat(fd)
            node = self._numbers.get((found.st_ino, S_ISDIR(found.st_mode)))
            if node is not None:
                self.changes.append(Synced(node))

        with pytest.MonkeyPatch.context() as patch:
            self._scan()
            self.begin = self._seen.copy()
            patch.setattr(os, "fsync", record)
            self._looking = False
            try:
                yield self
            finally:
                self._looking = True

    def done(self, what: str) -> None:
        """From now on, what was done so far may be relied on."""
        self.look()
        self.acknowledged.append((len(self.changes), what))

    def _heard(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._looking:
            return
        if event in CHANGES or (
            event == "open" and follow_fd(str(arguments[0])).startswith(os.fspath(self.root))
        ):
            self.look()

    def look(self) -> None:
        """Note what has changed since the last look."""
        with self._on:
            if self._looking:
                return
            self._looking = True
            try:
                before, after = self._seen, self._scan()
                self._note(before, after)
            finally:
                self._looking = False

    def _note(self, before: Disk, after: Disk) -> None:
        entries = [
            (folder, name, names.get(name))
            for folder, names in after.folders.items()
            for name in {*names, *before.folders.get(folder, {})}
            if names.get(name) != before.folders.get(folder, {}).get(name)
        ]
        came = {node for _, _, node in entries if node is not None}
        moved = came & before.files.keys() and len({folder for folder, _, _ in entries}) > 1
        if moved:  # of a file between folders: the new name first, then the end of the old one
            first = len(self.changes)
            self.changes.append(Names(tuple(each for each in entries if each[2] is not None)))
            gone = tuple(each for each in entries if each[2] is None)
            self.changes.append(Names(gone, needs=first))
        elif entries:
            self.changes.append(Names(tuple(entries)))
        self.changes += [
            Bytes(file, content)
            for file, content in after.files.items()
            if content != before.files.get(file, b"")
        ]

    def _scan(self) -> Disk:
        """All that is there now; numbers stay with what also had a name at the last look."""
        found = Disk()
        numbers = {(self.root.stat().st_ino, True): 0}

        def number(inode: int, is_folder: bool) -> int:
            key = inode, is_folder
            if key not in numbers:
                if key not in self._numbers:
                    self._given += 1
                fresh = -self._given if is_folder else self._given
                numbers[key] = self._numbers.get(key, fresh)
            return numbers[key]

        def scan(path: str, node: int) -> None:
            names = found.folders.setdefault(node, {})
            with os.scandir(path) as entries:
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    child = names[entry.name] = number(entry.inode(), is_folder)
                    if is_folder:
                        scan(entry.path, child)
                    elif child not in found.files:
                        found.files[child] = Path(entry.path).read_bytes()

        scan(os.fspath(self.root), 0)
        self._numbers, self._seen = numbers, found
        return found


def after(recording: Recording, instant: int) -> Disk:
    """The disk as the running system saw it after so many changes."""
    disk = recording.begin.copy()
    for change in recording.changes[:instant]:
        disk.apply(change)
    return disk


def cuts(recording: Recording, instant: int, random: Random, others: int) -> Iterator[Disk]:
    """What may be found if the power goes after so many changes.

    First with nothing of what is uncertain; then ``others``, drawn from these: all of it; of the
    last names that are uncertain, all up to one of them, all but one, and one alone; any of them.
    """
    changes = recording.changes[:instant]
    uncertain = _uncertain(changes)
    first = uncertain[0] if uncertain else instant
    base = after(recording, first)
    names = [at for at in uncertain if isinstance(changes[at], Names)]
    old, last = set(names[:-RECENT]), names[-RECENT:]
    choices = [old.union(last[:count]) for count in range(len(last) + 1)]
    choices += [{*names} - {one} for one in last] + [old | {one} for one in last]
    choices += [{at for at in names if random.random() < 0.5} for _ in range(others // 4)]
    fates = FATES if len(names) < len(uncertain) else FATES[:1]
    drawn = [(choice, fate) for choice in choices for fate in fates]
    nothing = set[int](), FATES[0]
    for choice, fate in (nothing, *random.sample(drawn, min(others, len(drawn)))):
        disk, lost = base.copy(), set(uncertain) - choice
        for at, change in enumerate(changes[first:], first):
            if isinstance(change, Bytes) and at in lost:
                before = disk.files.get(change.file, b"")
                how = random.choice(FATES[:-1]) if fate == "any" else fate
                disk.files[change.file] = _fate_of(before, change.content, how)
            elif at not in lost and not (isinstance(change, Names) and change.needs in lost):
                disk.apply(change)
        yield disk


def _uncertain(changes: Sequence[Names | Bytes | Synced]) -> list[int]:
    """Numbers of the changes that no sync has made certain."""
    synced = {each.what: at for at, each in enumerate(changes) if isinstance(each, Synced)}
    found: set[int] = set()
    for at, change in enumerate(changes):
        if isinstance(change, Synced):
            continue
        if not any(synced.get(each, -1) > at for each in change.where):
            found.add(at)
        elif isinstance(change, Names):
            found.discard(change.needs)  # that the old name ended is certain: so is the new one
    return sorted(found)


def _fate_of(old: bytes, new: bytes, how: str) -> bytes:
    half = len(new) // 2
    return {
        "old": old,
        "new": new,
        "torn": new[:half] + old[half:].ljust(len(new) - half, b"\0"),
        "zeros": bytes(len(new)),
    }[how]
