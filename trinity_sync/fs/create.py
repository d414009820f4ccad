"""Files that are written once: of several processes, one creates the file."""

import errno
import os
from pathlib import Path

from trinity_sync.fs.atomic import NO_LINKS, make_temporary_path, sync_folder, write_whole
from trinity_sync.fs.locks import file_lock


def create_file(path: Path, content: str | bytes) -> bool:
    """Write a file, whole and durably, unless there is one; return whether it was written.

    Args:
        path: the file.
        content: all that it will hold.
    """
    temporary = make_temporary_path(path)
    try:
        write_whole(temporary, content)
        _give_free_name(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _give_free_name(temporary: Path, path: Path) -> None:
    """Let a file have a name that no other has; FileExistsError if one has."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with file_lock(path.parent / ".names.lock"):
            if path.exists():
                raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
            temporary.replace(path)
