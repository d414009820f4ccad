"""The remote that a root requires, and which of its steps are there.

::

    root/.trinity_sync/store.json           the store; written when a run of the job begins
    root/.trinity_sync/stored/40.json       the store has the checkpoint of step 40, by this run

The root says it, as it says where ranks are: so commits, waits and removals
on every node go by the same remote, and a worker without the setting cannot leave it out.
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
    """Require a remote: from now on the steps of the root count when they are there.

    Args:
        root: the job's root.
        url: of the job's folder in the remote.
    """
    with suppress(CommitError):  # one that is torn is written anew
        if required_remote_of(root) == url:
            return
    make_folder(_store(root).parent)
    replace_file(_store(root), encode_record(_Store(url)))


def required_remote_of(root: str | Path) -> str:
    """Return the URL of the remote that a root requires; empty where it requires none.

    Raises:
        CommitError: the file that says so is torn.
        FormatError: another release has written it.
    """
    try:
        return decode_record(_Store, read_uncached(_store(root)), _store(root)).url
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise CommitError(
            f"{_store(root)} is torn, so the remote that the root requires is unknown; start "
            "the training with TRINITY_SYNC_REMOTE and TRINITY_SYNC_REMOTE_REQUIRED=true, which "
            "write it again"
        ) from error


def note_sent(root: str | Path, url: str, manifest: Manifest) -> None:
    """Record that the remote has a step.

    Args:
        root: the job's root.
        url: of the job's folder in the remote.
        manifest: of the step that is there.
    """
    note = _note(root, manifest.step)
    make_folder(note.parent)
    replace_file(note, encode_record(_Stored(url, manifest.run, manifest.kinds)))


def is_sent(root: str | Path, manifest: Manifest) -> bool:
    """Whether the required remote has a checkpoint, or it is none, or no remote is required.

    Raises:
        CommitError, FormatError: as `required_remote_of`; also if another release has written the
            record of the step.
    """
    url = required_remote_of(root)
    if not url or "checkpoint" not in manifest.kinds:
        return True
    path = _note(root, manifest.step)
    try:
        note = decode_record(_Stored, read_uncached(path), path)
    except (FileNotFoundError, ValueError):
        return False
    return (note.url, note.run) == (url, manifest.run) and "checkpoint" in note.kinds


def must_be_sent(root: str | Path, manifest: Manifest) -> bool:
    """Whether the required remote lacks a checkpoint that no later run has superseded."""
    if is_sent(root, manifest):
        return False
    return find_superseding_run(list_runs(root), manifest.run, manifest.step) is None


def _store(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "store.json"


def _note(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "stored" / f"{step}.json"
