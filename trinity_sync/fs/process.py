"""Processes: their identity, the holder of a lock, and handlers of signals that are held back.

The identity of a process is its pid and start time, which no later process has.

Handlers of signals are held back while a change must not be interrupted. Python calls a signal's
handler in the main thread between two of its instructions. So the error that a handler raises, such
as PyTorch's when a DataLoader's worker is killed, or the save that it makes, would come in the
middle of another save.
"""

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from trinity_sync.layout import parse_number


def read_umask() -> int:
    """Return the umask of this process, without the change that ``os.umask`` makes."""
    status = Path("/proc/self/status").read_text()
    if found := re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE):
        return int(found[1], 8)
    umask = os.umask(0o077)  # a kernel that does not tell
    os.umask(umask)
    return umask


def lower_thread_priority(nice: int, thread: int = 0) -> None:
    """Lower the priority of a thread to ``nice``, by default of this one, which ends with its work.

    Linux has a priority for each thread, unlike POSIX. A thread with a lower priority already (Ray
    starts its workers at 15) keeps it, because raising a priority takes a privilege. It is a
    courtesy to the training: where the kernel refuses it, as SELinux may, the work goes on without.
    """
    with suppress(OSError):
        if nice > os.getpriority(os.PRIO_PROCESS, thread):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def lower_session_priority(pid: int, nice: int) -> None:
    """Give the session of a process a niceness.

    Linux shares the CPU between sessions first where autogroups are on, which is usual outside of
    containers. There, the niceness of a thread counts within its session only.
    """
    group = Path(f"/proc/{pid}/autogroup")
    for _ in range(10):
        with suppress(OSError):  # there are none, they are off, or it has ended
            try:
                group.write_text(f"{nice}")
            except BlockingIOError:  # the kernel allows one change in 0.1 s to a user
                time.sleep(0.1)
                continue
        break


def read_process_identity(pid: int) -> str:
    """Return ``pid/start time``, which unlike a pid is never reused.

    The time is in clock ticks since the boot: seconds since the epoch change with the clock.

    Raises:
        ProcessLookupError: the process does not exist, or is a zombie.
        PermissionError: it belongs to another user and is hidden (``hidepid`` of ``/proc``).
    """
    if not 0 < pid < 1 << 31:
        raise ProcessLookupError(f"no process {pid}")
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # the name may have any bytes
    except FileNotFoundError:
        os.kill(pid, 0)  # raises as this function does, unless it is this user's
        raise PermissionError(f"process {pid} is hidden") from None
    state, *fields = stat.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}/{int(fields[18])}"


def read_process_namespace() -> str:
    """Return the machine and pid namespace in which this process's identity is valid.

    It is ``boot/pid:[namespace]``: a machine may get another name, and the first namespace has the
    same number on each of them; containers of a machine see only their own processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:  # a container hides it (``subset=pid``)
        boot = os.uname().nodename
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_process_alive(name: str) -> bool:
    """Return whether a process still runs on this node; a hidden process counts as running.

    ``name`` is its identity, as from `read_process_identity`.
    """
    pid = parse_number(name.partition("/")[0])
    try:
        return pid is not None and read_process_identity(pid) == name
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def describe_holder(fd: int, path: Path) -> str:
    """Return which process holds the lock of a file, as far as this node can tell.

    ``fd`` is open in this process. A holder on another node may have written its description to
    ``path``.
    """
    try:
        lock = _read_lock_name(fd)
        acquirers = _list_acquirers(lock)
        # the kernel names the process that acquired a lock, which may have left it to a child
        living = [pid for pid in acquirers if _lives(pid)]
        holders = living or (_list_inheritors(lock) if acquirers else [])
    except (OSError, LookupError, ValueError):
        return "an unknown process"
    if holders:
        return " and ".join(map(_describe_process, sorted(holders)))
    if acquirers:
        return f"a process that inherited it from process {acquirers[0]}, which has ended"
    return "a process that is not visible on this node" + _read_description(path)


def describe_this_process() -> str:
    """Return this process and its node, for messages on other nodes."""
    return f"{_describe_process(os.getpid())} on node {os.uname().nodename}"


def _lives(pid: int) -> bool:
    try:
        return bool(read_process_identity(pid))
    except ProcessLookupError:
        return False


def _describe_process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({_printable(command)})"


def _printable(text: bytes) -> str:
    kept = (each if each.isprintable() else "?" for each in text.decode(errors="replace").strip())
    return "".join(kept)[:200]


def _read_description(path: Path) -> str:
    """Return the description that the last exclusive holder wrote into the file, if any."""
    try:
        with path.open("rb") as file:
            note = _printable(file.readline(400))
    except OSError:
        return ""
    return f"; the last holder in the file is {note}" if note else ""


def _read_lock_name(fd: int) -> str:
    """Return ``device:inode`` as in ``/proc/locks``; ``stat`` has other devices on overlayfs."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    info = dict(line.split(":", 1) for line in text.splitlines())
    mount = info["mnt_id"].strip()
    lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    device = next(fields[2] for line in lines if (fields := line.split(" "))[0] == mount)
    major, minor = map(int, device.split(":"))
    return f"{major:02x}:{minor:02x}:{int(info.get('ino', os.fstat(fd).st_ino))}"


def _list_acquirers(lock: str) -> list[int]:
    found = []
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == lock:  # a waiting process has "->" there
            found.append(int(fields[4]))
    return found


def _list_inheritors(lock: str) -> list[int]:
    """Return the processes of this user that have the open file of the lock."""
    found = set()
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with suppress(OSError):
            if any("FLOCK" in line and lock in line for line in info.read_text().splitlines()):
                found.add(int(info.parts[2]))
    return sorted(found)


@contextmanager
def hold_handlers() -> Iterator[None]:
    """Call the handlers of signals that come within the block after it, where they may raise.

    A handler with ``is_harmless`` is called at once: it raises nothing and saves nothing. Handlers
    interrupt the main thread only; in others this does nothing.
    """
    global _held
    if threading.current_thread() is not threading.main_thread():
        yield
    elif _held and _held.is_own:
        _held.depth += 1
        try:
            yield
        finally:
            _held.depth -= 1
    else:
        hold = _Hold()
        try:
            hold.replace_handlers()
            _held = hold
            yield
        except _HandlerError as error:
            raise error.of_handler from None
        finally:
            _held = None
            try:
                hold.restore_handlers()
            finally:
                if hold.came:
                    hold.call_handlers()


def call_held_handlers() -> None:
    """Call the handlers that are held back, in a wait; an error of theirs ends the whole block.

    It does nothing within two blocks: the outer one does not expect to be ended.
    """
    if threading.current_thread() is threading.main_thread() and _held and not _held.depth:
        try:
            _held.call_handlers()
        except Exception as error:
            raise _HandlerError(error) from None


class _HandlerError(BaseException):
    """An error of a handler, which is not one of the block, on its way through it."""

    def __init__(self, of_handler: Exception) -> None:
        super().__init__(of_handler)
        self.of_handler = of_handler


class _Hold:
    """A handler that takes the place of all others, and notes which signals come."""

    def __init__(self) -> None:
        self.depth = 0
        """Blocks within the first one."""
        self._process = os.getpid()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._replaced: list[int] = []
        self.came: list[int] = []

    @property
    def is_own(self) -> bool:
        """Whether this is not a child that another thread has forked."""
        return self._process == os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_own:
            self.came.append(signum)
        else:
            self._handlers[signum](signum, frame)

    def replace_handlers(self) -> None:
        for signum in signal.valid_signals():
            handler = signal.getsignal(signum)
            if callable(handler) and not getattr(handler, "is_harmless", False):
                self._handlers[signum] = handler
                self._replaced.append(signum)
                _set_handler(signum, self)

    def restore_handlers(self) -> None:
        """Restore all handlers, whatever those that are restored already raise meanwhile."""
        raised: BaseException | None = None
        while self._replaced:
            try:
                while self._replaced:
                    signum = self._replaced[-1]
                    handler = self._handlers[signum]
                    if signal.getsignal(signum) is self:  # not if a handler has set another one
                        _set_handler(signum, handler)
                    self._replaced.pop()
            except BaseException as error:
                raised = error
        if raised:
            raise raised

    def call_handlers(self) -> None:
        """Call the handlers of all signals that came; the last error of them is raised."""
        with ExitStack() as calls:
            while self.came:
                signum = self.came.pop()
                calls.callback(self._handlers[signum], signum, None)


_held: _Hold | None = None
_libc = ctypes.PyDLL(None)  # its calls keep the GIL


def _set_handler(signum: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    """Replace a handler of Python; what C code has set over it stays, as that of faulthandler."""
    action = ctypes.create_string_buffer(1024)  # a struct sigaction; on Linux it has 152 bytes
    _libc.sigaction(signum, None, action)
    signal.signal(signum, handler)
    _libc.sigaction(signum, action, None)
