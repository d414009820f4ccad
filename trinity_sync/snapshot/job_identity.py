"""The identity of a job, which its path alone is not: a root may be removed, moved or copied.

::

    root/.trinity_sync/identity.json        random, made once with the root

The identifier of a job (`job_id`) is a digest of its root's path and this identity. It names the
job's folder in the spool, its flow runs and its events, so nothing that a removed root has left in
them is taken for that of a new one. A moved root keeps its identity. A copy gets a new one when it
is opened, because both may train on.

Only `open_identity` writes. A root without an identity, such as another system's, has an identifier
by its path.

The identity names the format of everything in the root but manifests and runs, which name their
own. Whoever opens a root reads it first, so a root of another release is refused before anything is
read or changed there.
"""

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync.errors import CommitError, RootAwayError, RootError, TrinitySyncError
from trinity_sync.fs.atomic import (
    UNWRITABLE,
    list_paths,
    make_folder,
    make_temporary_path,
    read_uncached,
    replace_file,
)
from trinity_sync.fs.locks import LOCKS, acquire_file_lock, create_file, open_lock_file
from trinity_sync.fs.records import Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, job_id_of

IDENTITY_FILE = f"{PRIVATE_FOLDER}/identity.json"


@dataclass(frozen=True)
class JobIdentity(Record, format=ROOT_FORMAT):
    """Content of the identity file."""

    identity: str
    root: str
    """Real path of the root that was opened last with this file: tells a copy from the original."""


def job_id(root: str | Path) -> str:
    """Return the identifier of the job at a root: the job's name and a digest.

    It asks the root's file system, which may hang; `SaveId.job` does not.

    Raises:
        CommitError, FormatError: as `read_identity`.
    """
    return job_id_of(Path(root).resolve(), read_identity(root))


def read_identity(root: str | Path) -> str:
    """Return the identity of the job at a root; empty if no process has opened the root yet.

    Raises:
        CommitError: the file is torn.
        FormatError: the root is of another release.
    """
    found = _read(root)
    return found.identity if found else ""


def explain_away(root: str | Path | None, job: str) -> str:
    """Return why this process does not see a job at its root; empty if it does, or for None."""
    try:
        if root is None or job_id_of(Path(root), read_identity(root)) == job:
            return ""
    except (OSError, TrinitySyncError) as error:  # ESTALE, EIO; it is torn
        return f"{root} does not tell whether job {job} is there: {error}"
    return (
        f"{root} is not mounted here, or was removed, moved or recreated: job {job} is not there. "
        "Mount it, or move it back; if it was removed, no action is needed."
    )


def require_root(root: str | Path, job: str) -> None:
    """Require that a job is at its root, before a file in it is created with its folders.

    Raises:
        RootAwayError: it is not.
        FormatError: another release has made the root.
    """
    if why := explain_away(root, job):
        with suppress(OSError, CommitError):
            read_identity(root)
        raise RootAwayError(why)


def open_identity(root: Path, *, adopted: str = "") -> str:
    """Return the identity of the job at a root; create it if the root has none or is a copy.

    ``root`` is a real path that exists. A new root that continues another job adopts its identity.
    A root that cannot be written, and is only read, stays as it is.

    Raises:
        RootError: the file that another process has just created is not visible here.
        CommitError, FormatError: as `read_identity`.
    """
    found = _read(root)
    if found and found.root == str(root) and adopted in ("", found.identity):
        return found.identity
    made = JobIdentity(adopted or uuid.uuid4().hex, str(root))
    try:
        return _write(root, found, made, adopted)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return found.identity if found else ""


def list_registered_roots(home: Path) -> list[Path]:
    """Return the roots in the registry in a home, sorted by name, also those that are gone.

    It does not look at the roots, whose file systems may hang.
    """
    roots = []
    for entry in list_paths(home / "roots", "*.json"):
        try:
            roots.append(Path(json.loads(entry.read_text())["root"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            continue  # removed meanwhile, or not an entry
    return roots


def register_root(home: Path, root: str | Path) -> None:
    """Add the root of a job to the registry in a home, unless it is there.

    Raises:
        OSError: the home cannot be written.
    """
    if not (entry := registry_path(home, root)).exists():
        make_folder(entry.parent)
        create_file(entry, json.dumps({"root": str(Path(root).resolve())}))


def registry_path(home: Path, root: str | Path) -> Path:
    """Return the path of a root's entry: the root may be gone, so its path alone names it."""
    return home / "roots" / f"{job_id_of(Path(root).resolve())}.json"


def _write(root: Path, found: JobIdentity | None, made: JobIdentity, adopted: str) -> str:
    path = root / IDENTITY_FILE
    make_folder(path.parent)
    with suppress(OSError):  # so that steps can be removed when the disk is full
        make_folder(path.with_name("trash"))
        for name in LOCKS:
            with open_lock_file(path.with_name(name)):
                pass
    if found is None and create_file(path, encode_record(made)):
        return made.identity
    with acquire_file_lock(path.with_suffix(".lock")):
        found = _read(root)
        if found is None:
            raise RootError(
                f"{path} exists and cannot be read, or the root was just removed; retry"
            )
        if not adopted and (found.root == str(root) or not _is_copy(root, found)):
            made = replace(found, root=str(root))
        if made != found:
            replace_file(path, encode_record(made))
    return made.identity


def _is_copy(root: Path, found: JobIdentity) -> bool:
    """Return whether the root that an identity file names is another folder of this identity."""
    original = Path(found.root)
    proof = make_temporary_path(root / IDENTITY_FILE)
    proof.touch()
    try:
        is_same = (original / PRIVATE_FOLDER / proof.name).exists()  # mounted at two paths
        return not is_same and read_identity(original) == found.identity
    except OSError:  # it was moved, or is on another machine
        return False
    finally:
        proof.unlink()


def _read(root: str | Path) -> JobIdentity | None:
    path = Path(root) / IDENTITY_FILE
    try:
        return decode_record(JobIdentity, read_uncached(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CommitError(
            f"{path}, which identifies the job, is torn or edited; restore it from a copy of the "
            "root or of its remote, or remove it: saves in flight are then not committed"
        ) from error
