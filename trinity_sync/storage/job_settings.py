"""Settings of a job, in its root, where every process that works on the job reads them.

::

    root/.trinity_sync/job.json       the settings that were set; all others have their defaults

So the trainer, the scheduled flows, the flow of a save and the command line agree, on every node.

Other users may be able to write into the root. What acts outside of it counts only from a file that
this user or root owns and nobody else may write (or in a folder of ``TRINITY_SYNC_TRUSTED_PATHS``).
A torn file fails no save: then all steps are kept, and nothing is copied.

Records tell which steps the remote has.

::

    root/.trinity_sync/stored/40.json       the remote has the checkpoint of step 40, of this run

Its URL is a setting of the job, so commits, waits and removals on every node use
the same remote.
"""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from trinity_sync.errors import ConfigError, warn_once
from trinity_sync.fs.atomic import (
    TRUSTED,
    is_trusted,
    list_paths,
    make_folder,
    open_no_follow,
    read_uncached,
    remove_file,
    replace_file,
    revalidate_folder,
    sync_folder,
)
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.records import (
    Count,
    Record,
    decode_body,
    describe,
    encode_body,
    encode_record,
    read_record,
)
from trinity_sync.layout import PRIVATE_FOLDER, Kind, WriteConcurrency, job_id_of
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import is_superseded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobSettings(Record):
    """The settings of a job."""

    keep: str = "all"
    """Retention policy of checkpoints, such as ``last=3,every=100``."""

    keep_weights: str = "last=2"
    """Retention policy of steps with weights only. The next one supersedes them, so two suffice."""

    keep_quarantine: str = "all"
    """Retention policy of quarantined and superseded steps, such as ``newer=30d``."""

    keep_model: str = ""
    """Retention policy of checkpoints of which only the weights stay, such as ``every=20``, where
    ``keep`` does not keep them; empty for none."""

    remote: str = ""
    """URL of the remote to which checkpoints are copied, such as ``s3://bucket/{job}``, where
    ``{job}`` stands for the root's name and a digest of its path; empty for none. No credentials,
    one job for each URL.
    """

    remote_required: bool = False
    """Whether a checkpoint counts only once the remote has it. Otherwise the checkpoint is
    copied after the commit. Without a URL in ``remote``: that is unknown."""

    remote_keep: str = "all"
    """Retention policy of checkpoints in the remote: as ``keep``, without metrics."""

    write_concurrency: WriteConcurrency = "all"
    """Shards that are written at once: ``all``; ``per_rank``, one of each rank; ``per_node``, one
    on each node; ``one``, one of the job."""

    rank_timeout_s: Annotated[float, msgspec.Meta(gt=0, lt=253e9)] = 600.0
    """Seconds that a save waits for the images of all ranks and roles once it was requested."""

    on_nonfinite: Literal["warn", "refuse"] = "warn"
    """What a save does whose weights or optimizer have NaN or infinite values: ``warn`` commits it
    with a warning; ``refuse`` fails it, and readers do not open such weights in shared memory."""

    frozen: Annotated[str, msgspec.Meta(pattern=r"^([\w-]+(/\w+)?(,[\w-]+(/\w+)?)*)?$")] = ""
    """What need not change from save to save, such as ``reference,critic/optim``: roles, or a
    component of one. All else is an alarm if it does not."""

    @property
    def required_remote(self) -> str:
        """URL of the remote that must have the job's checkpoints; empty if none must."""
        return self.remote if self.remote_required else ""


NAMES = tuple(field.name for field in fields(JobSettings))
"""Names of all settings of a job."""

_OUTSIDE = "remote", "remote_keep"
"""Settings that act outside of the root."""
_KEEPS_ALL: dict[str, Any] = dict.fromkeys(("keep", "keep_weights", "keep_quarantine"), "all")
_KEEPS_ALL["remote_required"] = True
"""Settings that count while the file is torn, so that nothing is removed."""


def read_job_settings(root: str | Path) -> JobSettings:
    """Read the settings of a job; while the file is torn, those that keep all steps."""
    return msgspec.convert(read_set_job_settings(root), describe(JobSettings))


def read_set_job_settings(root: str | Path) -> dict[str, Any]:
    """Return the settings of a job that were set and count, by name; as `read_job_settings`."""
    found, problem = _read(_path(root))
    if problem:
        warn_once(problem)
    return found


def find_settings_problem(root: str | Path) -> str:
    """Return why settings of a job do not count, and what to do; empty if all do."""
    return _read(_path(root))[1]


def _read(path: Path) -> tuple[dict[str, Any], str]:
    for folder in (path.parent.parent, path.parent):  # another node may have replaced it
        revalidate_folder(folder)
    try:
        with open_no_follow(path) as file:
            trusted, content = is_trusted(file.fileno()), file.read()
        found = decode_body(content)
        msgspec.convert(found, describe(JobSettings))
    except FileNotFoundError:
        return {}, ""
    except ValueError:
        return dict(_KEEPS_ALL), (
            f"{path} is torn or was edited, so the settings of the job are unknown: no step is "
            "removed or copied to a remote. Set them again: trinity-sync jobs set"
        )
    if not trusted and (ignored := [name for name in _OUTSIDE if name in found]):
        return {name: value for name, value in found.items() if name not in _OUTSIDE}, (
            f"ignoring {' and '.join(ignored)} in {path}, which other users may have written. Set "
            "them again as this user (trinity-sync jobs set), or set "
            f"{TRUSTED}={path.parent.parent}"
        )
    return found, ""


def write_job_settings(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    """Change settings of a job, whose root exists, and return all; others stay as they are.

    ``changes`` has values by name, as in `JobSettings`; None restores the default. Texts are
    converted to the type of the setting.

    Raises:
        ConfigError: a name is unknown, or a value has a wrong type.
    """
    for name in changes:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
            raise ConfigError(f"{name} is not a setting of a job; {hint}")
    with acquire_file_lock(_path(root).with_suffix(".lock")):
        return _write(root, changes)


def _write(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    before = read_set_job_settings(root)
    if "remote" not in before:
        before.pop("remote_required", None)
    after = {name: value for name, value in {**before, **changes}.items() if value is not None}
    if remote := after.get("remote"):  # in full, so that it is the same on every node
        after["remote"] = str(remote).rstrip("/").replace("{job}", job_id_of(Path(root).resolve()))
    try:
        settings = msgspec.convert(after, describe(JobSettings), strict=False)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{name}={value}" for name, value in changes.items())
        words = {name: get_args(hint) for name, hint in get_type_hints(JobSettings).items()}
        known = "".join(f" ({n} is one of {', '.join(words[n])})" for n in changes if words[n])
        raise ConfigError(f"{given}: {error}{known}; see trinity-sync jobs set --help") from error
    if settings.remote_required and not settings.remote:
        raise ConfigError("remote_required needs a remote; set remote as well")
    after = {name: value for name, value in msgspec.to_builtins(settings).items() if name in after}
    if before and not after:
        remove_file(_path(root))
        sync_folder(_path(root).parent)
    elif after != before:
        replace_file(_path(root), encode_body(after, indent=1), mode=0o644)
    return read_job_settings(root)  # which warns of what does not count on this file system


def _path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "job.json"


@dataclass(frozen=True)
class _Stored(Record):
    url: str
    run: Count
    kinds: tuple[Kind, ...]


def record_replicated(root: str | Path, url: str, manifest: Manifest) -> None:
    """Record that the remote at ``url`` has a step."""
    path = _record_path(root, manifest.step)
    make_folder(path.parent)
    replace_file(path, encode_record(_Stored(url, manifest.run, manifest.kinds)))


def is_replicated(root: str | Path, manifest: Manifest, url: str | None = None) -> bool:
    """Return whether a remote has a step; True for a sync, or without a remote.

    ``url`` is that of the required remote by default.
    """
    url = read_job_settings(root).required_remote if url is None else url
    if not url or not manifest.serves("checkpoint"):
        return True
    record = read_record(_Stored, _record_path(root, manifest.step), read_uncached)
    if record is None or (record.url, record.run) != (url, manifest.run):
        return False
    return "checkpoint" in record.kinds


def has_replicated(root: str | Path, url: str) -> bool:
    """Return whether a remote has had a step of a root, as far as it is recorded."""
    paths = list_paths(_record_path(root, 0).parent, "*.json")
    records = (read_record(_Stored, path, read_uncached) for path in paths)
    return any(record and record.url == url for record in records)


def needs_replication(root: str | Path, manifest: Manifest, url: str | None = None) -> bool:
    """Return whether a remote, or a required one that is unknown, lacks a step not superseded."""
    if url is None and (job := read_job_settings(root)).remote_required and not job.remote:
        lacks = manifest.serves("checkpoint")
    else:
        lacks = not is_replicated(root, manifest, url)
    return lacks and not is_superseded(root, manifest.run, manifest.step)


def _record_path(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "stored" / f"{step}.json"
