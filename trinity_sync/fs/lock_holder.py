"""Which process holds a lock of the kernel, in words, for messages."""

import os
from pathlib import Path

from trinity_sync.fs.process import read_process_identity


def describe_holder(fd: int, path: Path) -> str:
    """Return who holds the lock of a file, as far as this node can tell.

    Args:
        fd: the file, opened by this process.
        path: of the file, in which the holder may have noted itself.
    """
    try:
        lock = _name_in_proc(fd)
        takers = _takers(lock)
        # the kernel names who took a lock, which may have ended and left it to a child
        living = [pid for pid in takers if _lives(pid)]
        keepers = living or (_keepers(lock) if takers else [])
    except (OSError, LookupError, ValueError):
        return "an unknown process"
    if keepers:
        return " and ".join(map(_describe_process, sorted(keepers)))
    if takers:
        return f"a process that process {takers[0]}, which has ended, has left it to"
    return "a process that cannot be seen from here" + _note_in(path)


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
