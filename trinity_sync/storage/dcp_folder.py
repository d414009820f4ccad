"""Folders in which a program looks for what it saved with DCP: a step's files are linked there.

A program that calls ``dcp.save`` names a folder, which it renames, removes and adds files to later.
`trinity_sync.integrations.dcp.switch` saves it as a step of a root, next to that folder, and the
step's commit links the step's files into the folder. ``.metadata`` comes last, as with DCP's own
writer: until then the folder is no checkpoint of DCP.
"""

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

from trinity_sync.errors import CommitError, ConfigError, FormatError
from trinity_sync.fs.atomic import (
    is_trusted,
    link_or_copy,
    make_temporary_path,
    open_no_follow,
    read_uncached,
    replace_file,
    sync_folder,
)
from trinity_sync.fs.records import decode_record
from trinity_sync.layout import is_below, step_folder
from trinity_sync.storage.manifest import Manifest, encode_manifest, read_manifest
from trinity_sync.storage.runs import is_run_gone, list_runs

FOLDER_FILE = "dcp_folder"
"""File of a step with the path of the program's folder, below the parent folder of the root."""
INDEX = ".metadata"
RECORD = ".trinity_sync.json"
"""File in a program's folder with the manifest of what is linked there."""


def get_folder_name(root: Path, folder: Path) -> str | None:
    """Return the content of `FOLDER_FILE`; None if the folder is not below the root's parent."""
    found, parent = folder.resolve(), root.resolve().parent
    below = found.is_relative_to(parent) and not found.is_relative_to(root.resolve())
    name = found.relative_to(parent).as_posix() if below else ""
    return name if is_below(name) else None


def link_step(root: str | Path, step: int, role: str) -> None:
    """Link the files of a committed step into the folder of a program, if it names one.

    A later step of its run, or of a later one, that is linked there stays. Call it under the commit
    lock.

    Raises:
        ConfigError: the folder is not below the root's parent, or another user may have named it.
        OSError: a file cannot be linked, or the folder is missing, since its program removed it.
    """
    files = step_folder(root, step) / role
    try:
        with open_no_follow(files / FOLDER_FILE) as file:
            trusted, name = is_trusted(file.fileno()), os.fsdecode(file.read())
    except FileNotFoundError:
        return
    manifest = read_manifest(root, step)
    folder = Path(root).resolve().parent / name
    if not trusted or get_folder_name(Path(root), folder) != name or not manifest:  # by a link
        where = f"outside of {root}/.., or which another user may have named"
        raise ConfigError(f"{files} is not linked into {folder}, which is {where}")
    os.scandir(folder).close()  # raises what is wrong with it
    earlier = read_record(folder)
    if (
        earlier
        and earlier.job == manifest.job
        and not is_run_gone(list_runs(root), earlier.run, earlier.run_key)
    ):
        linked, now = (earlier.run, earlier.step), (manifest.run, step)
        if linked > now or (linked == now and (folder / INDEX).exists()):
            return
    for old in (INDEX, RECORD):  # before a file changes that they are about
        (folder / old).unlink(missing_ok=True)
    records = (each for each in manifest.files if (each.role, each.component) == (role, "dcp"))
    names = [PurePosixPath(each.path).name for each in records]
    for each in names:
        _link(files / each, folder / each)
    replace_file(folder / RECORD, encode_manifest(manifest))
    _link(files / INDEX, folder / INDEX)
    sync_folder(folder)


def read_record(folder: Path) -> Manifest | None:
    """Return the manifest of what is linked into a folder, with paths below it; None without one.

    Raises:
        CommitError: it was altered.
    """
    path = folder / RECORD
    try:
        manifest = decode_record(Manifest, read_uncached(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, FormatError) as error:
        raise CommitError(
            f"{path} is corrupted, or another release's ({error}); load another checkpoint, or "
            "remove the file to load this one without a comparison with its digests"
        ) from error
    files = (replace(each, path=PurePosixPath(each.path).name) for each in manifest.files)
    return replace(manifest, files=tuple(files))


def _link(file: Path, name: Path) -> None:
    """Give a file another name, in the place of the file that has it."""
    temporary = make_temporary_path(name)
    link_or_copy(file, temporary)
    os.replace(temporary, name)  # noqa: PTH105
    temporary.unlink(missing_ok=True)  # which stays where both are the same file
