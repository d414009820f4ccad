"""Exclusive creation of files: of several processes, one creates the file."""

import errno
import os
from pathlib import Path

from trinity_sync.fs.atomic import NO_LINKS, make_temporary_path, sync_folder, write_in_place
from trinity_sync.fs.locks import acquire_file_lock


def create_file(path: Path, content: str | bytes) -> bool:
    """Create a file atomically and durably; return False if it exists."""
    temporary = make_temporary_path(path)
    try:
        write_in_place(temporary, content)
        _rename_exclusively(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _rename_exclusively(temporary: Path, path: Path) -> None:
    """Rename a temporary file to a name that no other file has.

    Raises:
        FileExistsError: another file has the name.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with acquire_file_lock(path.parent / ".names.lock"):
            if path.exists():
                raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
            temporary.replace(path)
