"""Required remote: the remote that must have a root's checkpoints, and those that it has.

::

    root/.trinity_sync/stored/40.json       the remote has the checkpoint of step 40, of this run

Its URL is a setting of the job (`job_settings`), so commits, waits and removals on every node use
the same remote.
"""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.fs.atomic import make_folder, read_uncached, replace_file
from trinity_sync.fs.records import Count, Record, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, Kind
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import find_superseding_run, list_runs


@dataclass(frozen=True)
class _Stored(Record, format=ROOT_FORMAT):
    url: str
    run: Count
    kinds: tuple[Kind, ...]


def read_required_remote(root: str | Path) -> str:
    """Return the URL of the remote that a root requires; empty if it requires none.

    Raises:
        FormatError: another release has written the file with the job's settings.
    """
    return read_job_settings(root).required_remote


def record_replicated(root: str | Path, url: str, manifest: Manifest) -> None:
    """Record that the remote at ``url`` has a step."""
    path = _record_path(root, manifest.step)
    make_folder(path.parent)
    replace_file(path, encode_record(_Stored(url, manifest.run, manifest.kinds)))


def is_replicated(root: str | Path, manifest: Manifest) -> bool:
    """Return whether the required remote has a step; True for a sync, or if no remote is required.

    Raises:
        FormatError: another release has written the URL or the record of the step.
    """
    url = read_required_remote(root)
    if not url or "checkpoint" not in manifest.kinds:
        return True
    record = read_record(_Stored, _record_path(root, manifest.step), read_uncached)
    if record is None or (record.url, record.run) != (url, manifest.run):
        return False
    return "checkpoint" in record.kinds


def needs_replication(root: str | Path, manifest: Manifest) -> bool:
    """Return whether the required remote lacks a checkpoint that is not superseded."""
    if is_replicated(root, manifest):
        return False
    return find_superseding_run(list_runs(root), manifest.run, manifest.step) is None


def _record_path(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "stored" / f"{step}.json"
