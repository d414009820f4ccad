"""Description of the process that holds a kernel lock, for messages."""

import os
from contextlib import suppress
from pathlib import Path

from trinity_sync.fs.process import read_process_identity


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
    """Return the processes that acquired a lock."""
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
