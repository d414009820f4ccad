"""Locks of the kernel on files (``flock``): released at once, left alone by children, bounded.

Such a lock belongs to the open file, and a forked child has that file open, too: it would keep the
lock when the parent closes its descriptor. So a lock is released before its file is closed, and a
forked child closes the lock files of its parent, which also leaves no lock behind when the parent
is killed. A mapping keeps its file open as well, so memory is mapped through another open file.
Programs that are started inherit none of this: descriptors are close-on-exec.

Nobody waits for a lock in silence: a warning names the process that holds it, and where a lock is
held for moments only, waiting ends with an error.
"""

import fcntl
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.errors import LockTimeoutError
from trinity_sync.fs.process import process_name

logger = logging.getLogger(__name__)

SAY_S = 5.0
"""Seconds after which a process that waits says so; then after four times as many, and so on."""
SAY_LATE_S = 60.0
"""The same where others may rightly take any time, as who writes a shard when one may at a time."""

FORK_S = 1.0
"""Seconds for which a fork waits for files that other threads open or close. On a file server that
is away that takes as long as the server likes, and the one that forks is a trainer."""

_open_here: weakref.WeakSet["LockFile"] = weakref.WeakSet()
_changing: dict[object, int] = {}
"""Threads that open or close a file, for which the set does not tell the same."""
_changed = threading.Condition()
"""Of these, and held by who forks."""


class LockFile:
    """An open file and its lock.

    Args:
        path: of the file.
        flags: as of ``os.open``.
        mode: of a file that is made.
    """

    def __init__(self, path: Path, flags: int, mode: int = 0o600) -> None:
        self.path = path
        self.fd = -1
        with _change():
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            _open_here.add(self)

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if no other open file has it; whether it was taken."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, *, shared: bool = False, limit_s: float = math.inf) -> None:
        """Wait for the lock.

        Raises:
            LockTimeoutError: others have had it for ``limit_s`` seconds.
        """
        self.wait(lambda: self.try_acquire(shared=shared), limit_s)

    def wait(self, attempt: Callable[[], bool], limit_s: float) -> None:
        """Wait until an attempt to take a lock of the file succeeds; raises as `acquire`."""
        began, say_s = time.monotonic(), SAY_S if math.isfinite(limit_s) else SAY_LATE_S
        while not attempt():
            waited = time.monotonic() - began
            if waited >= limit_s:
                holder = self.holder()
                raise LockTimeoutError(
                    f"the lock {self.path} was not released within {limit_s:g} s: it is held by "
                    f"{holder}. See what that process does, end it if it hangs, and try again.",
                    path=self.path,
                    holder=holder,
                )
            if waited >= say_s:
                say_s *= 4
                logger.warning(
                    "waiting for the lock %s for %.0f s; it is held by %s",
                    self.path,
                    waited,
                    self.holder(),
                )
            # a blocking flock could neither be bounded nor tell what it waits for
            time.sleep(min(0.001 + waited / 10, 0.1, max(0.0, limit_s - waited)))

    def release(self) -> None:
        """Give the lock back; in a forked child, leave it to the parent."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # a child that has the file open would keep it

    def close(self) -> None:
        """Release the lock and close the file; again is harmless."""
        with suppress(OSError):  # of a server that is away: closing says no more
            self.release()
        with _change():
            self.leave()

    def leave(self) -> None:
        """Close the file, and leave the lock to a process that has the same open file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def map(self, nbytes: int, *, writable: bool = False, populate: bool = False) -> mmap.mmap:
        """The first bytes of the file as memory that processes share; it keeps no lock.

        Args:
            nbytes: how many.
            writable: map them to be written to, too.
            populate: map all pages at once, and not each when it is touched.
        """
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with opened_again(self.fd, os.O_RDWR if writable else os.O_RDONLY) as fd:
            return mmap.mmap(fd, nbytes, flags, prot)

    def holder(self) -> str:
        """Who has the lock, in words, as far as this node can tell."""
        try:
            lock = _name_in_proc(self.fd)
            takers = _takers(lock)
            # the kernel names who took a lock, which may have ended and left it to a child
            living = [pid for pid in takers if _lives(pid)]
            keepers = living or (_keepers(lock) if takers else [])
        except (OSError, LookupError, ValueError):
            return "an unknown process"
        if keepers:
            return " and ".join(map(_process, sorted(keepers)))
        if takers:
            return f"a process that process {takers[0]}, which has ended, has left it to"
        return "a process that cannot be seen from here" + _note_in(self.path)

    def __del__(self) -> None:  # wherever the collector runs, so it waits for nothing
        with suppress(OSError):
            self.release()
        self.leave()


@contextmanager
def opened_again(fd: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The same file, opened once more: it has no part in the lock of the first."""
    again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        yield again
    finally:
        os.close(again)


def name_of_process() -> str:
    """This process, as others may find it in a message."""
    return f"{_process(os.getpid())} on node {os.uname().nodename}"


def _lives(pid: int) -> bool:
    try:
        return bool(process_name(pid))
    except ProcessLookupError:
        return False


def _process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({_printable(command)})"


def _printable(text: bytes) -> str:
    kept = (each if each.isprintable() else "?" for each in text.decode(errors="replace").strip())
    return "".join(kept)[:200]


def _note_in(path: Path) -> str:
    """What the last process that had the lock alone has written into the file, if it did."""
    try:
        with path.open("rb") as file:
            note = _printable(file.readline(400))
    except OSError:
        return ""
    return f"; the last to note itself in the file is {note}" if note else ""


def _name_in_proc(fd: int) -> str:
    """``device:inode`` as ``/proc/locks`` has them; ``stat`` tells of other devices (overlay)."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    info = dict(line.split(":", 1) for line in text.splitlines())
    mount = info["mnt_id"].strip()
    lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    device = next(fields[2] for line in lines if (fields := line.split(" "))[0] == mount)
    major, minor = map(int, device.split(":"))
    return f"{major:02x}:{minor:02x}:{int(info.get('ino', os.fstat(fd).st_ino))}"


def _takers(lock: str) -> list[int]:
    """The processes that took a lock."""
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == lock:  # that of one who waits has "->" there
            found.append(int(fields[4]))
    return found


def _keepers(lock: str) -> list[int]:
    """The processes of this user that have the open file to which the lock belongs."""
    found = set()
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if any("FLOCK" in line and lock in line for line in info.read_text().splitlines()):
                found.add(int(info.parts[2]))
        except OSError:
            continue
    return sorted(found)


@contextmanager
def _change() -> Iterator[None]:
    """Open or close a file; others may do so meanwhile, and a fork waits `FORK_S` for it."""
    this = object()
    with _changed:
        _changing[this] = threading.get_ident()
    try:
        yield
    finally:
        with _changed:
            _changing.pop(this, None)
            _changed.notify_all()


def _await_others() -> None:
    """Before a fork: let none begin to open or close a file, and let those end that have."""
    _changed.acquire()
    mine = threading.get_ident()  # a signal's handler may fork while its thread opens a file
    if not _changed.wait_for(
        lambda: all(each == mine for each in tuple(_changing.values())), FORK_S
    ):
        _changing.clear()  # the next fork does not wait for the same once more


def _leave_to_parent() -> None:
    global _changed
    _changed = threading.Condition()  # threads that wait for the old one are not here
    _changing.clear()
    for file in list(_open_here):
        file.leave()


def _let_others() -> None:
    _changed.release()


os.register_at_fork(
    before=_await_others, after_in_parent=_let_others, after_in_child=_leave_to_parent
)
