"""Required remote: the remote that must have a root's checkpoints, and those that it has.

::

    root/.trinity_sync/store.json           its URL; written when a run of the job begins
    root/.trinity_sync/stored/40.json       the remote has the checkpoint of step 40, of this run

The URL is in the root, as the placement is: commits, waits and removals on every node use the same
remote, and a worker without the setting cannot omit it.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.fs.atomic import make_folder, read_uncached, replace_file
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, Kind
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import find_superseding_run, list_runs


@dataclass(frozen=True)
class _Store(Record, format=ROOT_FORMAT):
    url: str


@dataclass(frozen=True)
class _Stored(Record, format=ROOT_FORMAT):
    url: str
    run: Count
    kinds: tuple[Kind, ...]


def write_required_remote(root: str | Path, url: str) -> None:
    """Require a remote: from now on a checkpoint of the root counts once the remote has it.

    Args:
        root: the job's root.
        url: URL of the job's folder in the remote.
    """
    with suppress(CommitError):  # a torn file is written again
        if read_required_remote(root) == url:
            return
    make_folder(_url_path(root).parent)
    replace_file(_url_path(root), encode_record(_Store(url)))


def read_required_remote(root: str | Path) -> str:
    """Return the URL of the remote that a root requires; empty if it requires none.

    Raises:
        CommitError: the file with the URL is torn.
        FormatError: another release has written it.
    """
    try:
        return decode_record(_Store, read_uncached(_url_path(root)), _url_path(root)).url
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise CommitError(
            f"{_url_path(root)} is torn, so the required remote of the root is unknown; start "
            "the training with TRINITY_SYNC_REMOTE and TRINITY_SYNC_REMOTE_REQUIRED=true, which "
            "write it again"
        ) from error


def record_replicated(root: str | Path, url: str, manifest: Manifest) -> None:
    """Record that the remote has a step.

    Args:
        root: the job's root.
        url: URL of the job's folder in the remote.
        manifest: manifest of the step.
    """
    path = _record_path(root, manifest.step)
    make_folder(path.parent)
    replace_file(path, encode_record(_Stored(url, manifest.run, manifest.kinds)))


def is_replicated(root: str | Path, manifest: Manifest) -> bool:
    """Return whether the required remote has a step; True for a sync, or if no remote is required.

    Args:
        root: the job's root.
        manifest: manifest of the step.

    Raises:
        CommitError: as `read_required_remote`.
        FormatError: another release has written the URL or the record of the step.
    """
    url = read_required_remote(root)
    if not url or "checkpoint" not in manifest.kinds:
        return True
    path = _record_path(root, manifest.step)
    try:
        record = decode_record(_Stored, read_uncached(path), path)
    except (FileNotFoundError, ValueError):
        return False
    return (record.url, record.run) == (url, manifest.run) and "checkpoint" in record.kinds


def needs_replication(root: str | Path, manifest: Manifest) -> bool:
    """Return whether the required remote lacks a checkpoint that is not superseded.

    Args:
        root: the job's root.
        manifest: manifest of the step.
    """
    if is_replicated(root, manifest):
        return False
    return find_superseding_run(list_runs(root), manifest.run, manifest.step) is None


def _url_path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "store.json"


def _record_path(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "stored" / f"{step}.json"
