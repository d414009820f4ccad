"""The file system of a path: its type, its clock, and the room in it.

The kernel reports the type in ``/proc/self/mountinfo``. ``psutil.disk_partitions`` is not enough:
if ``/etc/mtab`` is a regular file, psutil reads that, and the kernel does not update it.

The clock may be that of a file server. Leases begin at the mtime of their files, so the clock of a
node that is ahead must not end them.

Files below /dev/shm take memory. A container or a Slurm job has a limit of its own, in its control
group, which counts shared memory: the kernel ends a process that exceeds it, although the file
system has room.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import open_to_append
from trinity_sync.layout import PRIVATE_FOLDER

LOCAL_TYPES = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs"}
LOCAL_TYPES |= {"xfs", "zfs"}
"""Types of local file systems. Other nodes may see the files of any other type."""

_OBJECT_STORES = re.compile(
    r"s3fs|rclone|gcsfuse|goofys|geesefs|tigrisfs|mountpoint-s3|blobfuse2?|ossfs2?|obsfs|cosfs"
)
"""Types or sources of FUSE mounts of object stores. Their renames are copies followed by removals,
and their locks exist in the kernel of one node only."""

_LOCAL_LOCKS = re.compile(r"nolock|local_lock=(all|flock)|localflock|nobrl")
"""Options of NFS, Lustre and CIFS that keep locks on this node."""


CLOCKS_DIFFER_S = 300.0
"""Seconds by which two clocks differ that are not both right."""
_SPARE = 1 << 30
"""Bytes, or a thirty-second, of a memory limit that images leave to the training."""
_UNLIMITED = 1 << 60
STALL = "processes wait for memory"
"""Begin of what `find_shortage` returns if no limit is near."""
_PROC = Path("/proc/self")
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""By the version of control groups: files with the limit and the use of a group, and the lines of
``memory.stat`` with the page cache, which the kernel can free."""


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: Path
    kind: str
    """Type: ``ext4``, ``nfs4``, ``fuse.s3fs``."""
    source: str
    """Device or server path that is mounted."""
    options: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether other nodes may see the same files."""
        return self.kind not in LOCAL_TYPES

    @property
    def is_object_store(self) -> bool:
        """Whether it is the mount of an object store, whose renames are copies."""
        fuse, _, name = self.kind.partition(".")
        return fuse == "fuse" and any(map(_OBJECT_STORES.fullmatch, (name, self.source)))

    @property
    def local_lock_option(self) -> str:
        """The option that keeps locks on this node; empty without it."""
        return next((each for each in self.options if _LOCAL_LOCKS.fullmatch(each)), "")

    @property
    def weak_consistency_option(self) -> str:
        """The option that turns off close-to-open consistency; empty without it."""
        return "nocto" if "nocto" in self.options else ""

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.point}"


def find_mount(path: str | Path, mountinfo: str | None = None) -> Mount:
    """Return the mount of a path, which need not exist.

    Its type is ``unknown`` if the kernel does not report it. ``mountinfo`` replaces the text of
    ``/proc/self/mountinfo``.
    """
    real = Path(path).resolve()
    if mountinfo is None:  # mount points may have any bytes in their names
        mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    best = Mount(Path("/"), "unknown", "", ())
    for line in filter(None, mountinfo.split("\n")):
        of_mount, _, of_system = line.partition(" - ")
        fields = of_mount.split(" ")
        kind, source, options = of_system.split(" ", 2)  # source: may be empty; options: have " "
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if real.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            best = Mount(point, kind, source, (*fields[5].split(","), *options.split(",")))
    return best


def is_recent(at: float, now: float, within_s: float) -> bool:
    """Return whether a time was within some seconds; not one of a clock that was set back since."""
    return -CLOCKS_DIFFER_S < now - at < within_s


def read_file_system_time(root: str | Path) -> float:
    """Return the current time of a root's file system, in seconds since the epoch.

    If the root cannot be written, it is the time of this node.
    """
    path = Path(root) / PRIVATE_FOLDER / ".now"
    try:
        with open_to_append(path) as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


@dataclass(frozen=True)
class Room:
    """Bytes that can be had in a folder."""

    nbytes: int
    enlarge: str
    """How to have more of what bounds them, as a part of a sentence."""


def find_room(folder: Path) -> Room:
    """Return the room for files in a folder: the smaller of the file system's and the memory's."""
    found = os.statvfs(folder)
    enlarge = "Enlarge it (mount -o remount,size=... /dev/shm, or --shm-size of the container)"
    room = Room(found.f_bavail * found.f_frsize, enlarge)
    if find_mount(folder).kind != "tmpfs":
        return room
    for group, left in _iter_limits():
        if left < room.nbytes:
            enlarge = f"The memory limit of {group} counts shared memory: raise it (--memory)"
            room = Room(max(0, left), enlarge)
    return room


def find_shortage(more: int = 0) -> str:
    """Return what is short of memory once ``more`` bytes are taken, as a part of a sentence.

    Empty if no memory limit of this process is near, the host has memory, and its processes have
    not all waited for it for a tenth of the last ten seconds (PSI, pressure stall information).
    """
    groups = dict(_iter_limits())
    for group, left in groups.items():
        if left < more:
            return f"the memory limit of {group} is near"
    if _measure_available() < more:
        return "the host's memory is nearly used up"
    for file in (_PROC.parent / "pressure/memory", *(g / "memory.pressure" for g in groups)):
        with suppress(OSError, ValueError, IndexError):  # no such file, as before Linux 4.20
            full = file.read_text().splitlines()[1].split()
            if float(full[1].removeprefix("avg10=")) >= 10:
                return f"{STALL} ({file}: {full[1]})"
    return ""


def measure_ray_stores(folder: Path) -> int:
    """Return the bytes that object stores of Ray may still take of a folder's file system.

    A store has its whole size from the beginning, and takes memory as objects come.
    """
    left, device = dict[int, int](), folder.stat().st_dev
    for name in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # the process has ended, or is another user's
            for fd in (name.parent / "fd").iterdir() if name.read_bytes() == b"raylet\n" else ():
                found = fd.stat()
                if found.st_dev == device:
                    left[found.st_ino] = max(0, found.st_size - found.st_blocks * 512)
    return sum(left.values())


def _measure_available() -> int:
    """Return the bytes that the host's memory leaves to images."""
    with suppress(OSError, ValueError, KeyError):
        lines = (_PROC.parent / "meminfo").read_text().splitlines()
        left = {name: int(kib.split()[0]) << 10 for name, kib in (x.split(":") for x in lines)}
        return left["MemAvailable"] - min(left["MemTotal"] // 32, _SPARE)
    return _UNLIMITED


def _iter_limits() -> Iterator[tuple[Path, int]]:
    """Yield each control group of this process with a limit, and the bytes it leaves to images."""
    for kind, point, folder in _list_groups():
        limit_file, used_file, cached = _FILES[kind]
        for group in [folder, *folder.parents]:
            with suppress(OSError, ValueError):  # no limit: "max", or no such file
                limit = int((group / limit_file).read_text())
                if limit < _UNLIMITED:
                    lines = (group / "memory.stat").read_text().splitlines()
                    counts = dict(line.split(" ", 1) for line in lines)
                    used = int((group / used_file).read_text())
                    free = limit - used + sum(int(counts.get(name, 0)) for name in cached)
                    yield group, free - min(limit // 32, _SPARE)
            if group == point:
                break


def _list_groups() -> Iterator[tuple[str, Path, Path]]:
    """Yield version, mount point and folder of the control groups with a memory limit."""
    paths = dict[str, str]()
    with suppress(OSError):
        for line in (_PROC / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths["cgroup" if controllers else "cgroup2"] = path
        for line in os.fsdecode((_PROC / "mountinfo").read_bytes()).splitlines():
            of_mount, _, of_system = line.partition(" - ")
            kind, _, options = of_system.split(" ", 2)
            root, point = of_mount.split(" ")[3:5]
            if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
                below = Path(paths[kind])
                inside = below.relative_to(root) if below.is_relative_to(root) else Path()
                yield kind, Path(point), Path(point) / inside
