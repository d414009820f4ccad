"""Files of removed steps, kept for the next saves to write over.

Writing over blocks that a file has already is about twice as fast as writing a fresh one. A spare
file lies under a random name in ``root/.trinity_sync/spare`` and belongs to nothing; a writer takes
it by renaming it to its own temporary name, so whatever dies when, no step ever names a file that
is written over. Nor is a file that somebody else still reads, may write or has linked elsewhere: it
is removed in the usual way, which leaves its content to them. So is one on a file system that other
nodes may see: the kernel of this one does not know what they read.
"""

import errno
import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

from trinity_sync.fs.atomic import REMOVED_PREFIX, make_folder, sync_folder
from trinity_sync.fs.file_lease import is_ours_alone
from trinity_sync.fs.mounts import mount_of
from trinity_sync.layout import PRIVATE_FOLDER

WORTHWHILE = 1 << 20
"""Bytes from which a file is worth keeping."""


def can_reuse_blocks(root: str | Path, setting: bool | Literal["always"]) -> bool:
    """Whether files of removed steps may be kept for others to write over.

    Args:
        root: the job's root.
        setting: as in the settings; ``always`` where no other node reads steps, though it might.
    """
    return setting == "always" or (setting and not mount_of(root).shared)


def remove_folder(root: str | Path, folder: Path, *, keep: int) -> None:
    """Remove a folder that nothing names any more, and keep its large files as spares.

    Of a symbolic link, the link alone.

    Args:
        root: the job's root, on the same file system.
        folder: what to remove.
        keep: bytes that all spares together may have afterwards; 0 keeps none.
    """
    room = keep - sum(_spares(root).values())
    for path in () if folder.is_symlink() else folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        nbytes = path.stat().st_size
        if WORTHWHILE <= nbytes <= room and is_ours_alone(path):  # first: a spare may be taken
            spare = _folder(root) / uuid.uuid4().hex
            make_folder(spare.parent)
            path.rename(spare)
            room -= nbytes
    remove_tree(folder)


def remove_tree(folder: Path) -> bool:
    """Remove a folder, or a link to one; whether nothing of it is left.

    The folder of a file that NFS keeps (`REMOVED_PREFIX`) stays, for whoever removes it next.

    Raises:
        OSError: something else cannot be removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return True
    shutil.rmtree(folder, ignore_errors=True)
    left = [path for path in folder.rglob("*") if not path.is_dir()]
    if left and all(path.name.startswith(REMOVED_PREFIX) for path in left):
        return False
    if folder.exists():
        shutil.rmtree(folder)  # says why it cannot
    return True


def take_spare(root: str | Path, temporary: Path, nbytes: int) -> bool:
    """Put a spare file, if there is one, at ``temporary``, to be written over with ``nbytes``.

    The smallest that is large enough, else the largest; none for a step that is a link to another
    file system.
    """
    if nbytes < WORTHWHILE:
        return False
    sizes = _spares(root)
    for path in sorted(sizes, key=lambda path: (sizes[path] < nbytes, abs(sizes[path] - nbytes))):
        try:
            path.rename(temporary)
        except FileNotFoundError:
            continue  # another writer was faster
        except OSError as error:
            if error.errno == errno.EXDEV:
                return False
            raise
        found = temporary.lstat()
        linked = found.st_nlink > 1  # since, by somebody who found it
        if linked or found.st_uid != os.getuid() or found.st_mode & 0o022:
            temporary.unlink()  # or others could write what is committed in it
            continue
        sync_folder(path.parent)  # or after a power cut it might have two names, one of a commit
        return True
    return False


def remove_spares(root: str | Path) -> None:
    """Give the room of all spare files back."""
    shutil.rmtree(_folder(root), ignore_errors=True)


def _spares(root: str | Path) -> dict[Path, int]:
    """The spare files and their sizes."""
    sizes = {}
    for path in _folder(root).glob("*"):
        with suppress(FileNotFoundError):  # taken meanwhile
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                sizes[path] = found.st_size
    return sizes


def _folder(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "spare"
