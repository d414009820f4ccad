"""Which file system a path is on, as the kernel says in ``/proc/self/mountinfo``.

``psutil.disk_partitions`` will not do: where ``/etc/mtab`` is a file of its own, it reads that, and
the kernel does not update it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

OF_THIS_NODE = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs"}
OF_THIS_NODE |= {"xfs", "zfs"}
"""Types of which no other node sees the files. Of a type that is not named, one may."""

_OBJECT_STORES = re.compile(
    r"s3fs|rclone|gcsfuse|goofys|geesefs|tigrisfs|mountpoint-s3|blobfuse2?|ossfs2?|obsfs|cosfs"
)
"""What FUSE mounts of object stores call themselves, as a type or as what is mounted. They have a
rename, a copy that is followed by a removal, and locks that the kernel of a node makes up."""

_LOCKS_OF_THIS_NODE = re.compile(r"nolock|local_lock=(all|flock)|localflock|nobrl")
"""Options of NFS, Lustre and CIFS with which a lock is not told to other nodes."""


@dataclass(frozen=True)
class Mount:
    """Where a file system is mounted, and how."""

    point: Path
    kind: str
    """Its type: ``ext4``, ``nfs4``, ``fuse.s3fs``."""
    source: str
    """What is mounted."""
    options: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether other nodes may see the same files."""
        return self.kind not in OF_THIS_NODE

    @property
    def is_object_store(self) -> bool:
        """Whether it is the mount of an object store, whose renames are copies."""
        fuse, _, name = self.kind.partition(".")
        return fuse == "fuse" and any(map(_OBJECT_STORES.fullmatch, (name, self.source)))

    @property
    def local_lock_option(self) -> str:
        """The option with which other nodes do not hear of locks; empty if there is none."""
        return next((each for each in self.options if _LOCKS_OF_THIS_NODE.fullmatch(each)), "")

    @property
    def weak_consistency_option(self) -> str:
        """The option with which it is not asked anew what others have changed; empty without it."""
        return "nocto" if "nocto" in self.options else ""

    def __str__(self) -> str:
        return f"{self.kind}, mounted at {self.point}"


def find_mount(path: str | Path, mountinfo: str | None = None) -> Mount:
    """The mount that a path is on; of type ``unknown`` where the kernel does not tell.

    Args:
        path: need not exist.
        mountinfo: text in the form of ``/proc/self/mountinfo``, which it is by default.
    """
    real = Path(path).resolve()
    if mountinfo is None:  # other people's mounts may have any bytes in their names
        mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    best = Mount(Path("/"), "unknown", "", ())
    for line in filter(None, mountinfo.split("\n")):
        of_mount, _, of_system = line.partition(" - ")
        fields = of_mount.split(" ")
        kind, source, options = of_system.split(" ")  # "" is a source, too
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if real.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            best = Mount(point, kind, source, (*fields[5].split(","), *options.split(",")))
    return best
