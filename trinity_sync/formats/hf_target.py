"""Target folder of an export: validation, lock, and replacement."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trinity_sync.errors import ConfigError, ExportError
from trinity_sync.formats.safetensors import read_progress
from trinity_sync.fs.atomic import UNWRITABLE, sync_folder
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.export_requests import exports_folder


def check_target(to: Path, root: Path) -> Path:
    """Return the absolute path of the folder to export to, given as the user passed it.

    Raises:
        ConfigError: it contains other files, or is part of the job.
    """
    target = to.absolute().resolve()
    if target == root or target in root.parents or target.is_relative_to(root / PRIVATE_FOLDER):
        raise ConfigError(f"{to} is or contains the job itself; export to another folder")
    inside = target.relative_to(root).parts[0] if target.is_relative_to(root) else ""
    if inside.startswith("global_step_"):
        raise ConfigError(
            f"{to} is part of a step; omit --to to export into the step, or choose another folder"
        )
    if target.exists():
        ours = target.is_dir() and read_progress(target) is not None
        if not target.is_dir() or (any(target.iterdir()) and not ours):
            raise ConfigError(
                f"{to} is not empty and not an earlier export; nothing was changed. Choose another "
                "folder, or remove it."
            )
    return target


@contextmanager
def lock_export(root: Path, scratch: Path) -> Iterator[None]:
    """Hold the lock of an export target within the block; a root that cannot be written has none.

    Raises:
        ExportError: another export holds it.
    """
    exports = exports_folder(root)
    name = hashlib.sha256(os.fsencode(scratch)).hexdigest()[:16]
    lock = exports / f"{scratch.name if scratch.parent == exports else name}.lock"
    with ExitStack() as held:
        try:
            acquired = held.enter_context(try_acquire_file_lock(lock))
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            acquired = True
        if not acquired:
            raise ExportError(
                f"another export to the same folder is in flight ({scratch}); wait until it ends"
            )
        yield


def replace_target(scratch: Path, target: Path) -> None:
    """Rename a finished export to its target, and remove an earlier export there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    scratch.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
