"""The file system of a path: its type and its clock.

The kernel reports the type in ``/proc/self/mountinfo``. ``psutil.disk_partitions`` is not enough:
if ``/etc/mtab`` is a regular file, psutil reads that, and the kernel does not update it.

The clock may be that of a file server. Leases begin at the mtime of their files, so the clock of a
node that is ahead must not end them.
"""

import os
import re
import time
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
        kind, source, options = of_system.split(" ")  # the source may be empty
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if real.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            best = Mount(point, kind, source, (*fields[5].split(","), *options.split(",")))
    return best


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
