"""Settings of a job, in its root, where every process that works on the job reads them.

::

    root/.trinity_sync/job.json       the settings that were set; all others have their defaults

So the trainer, the scheduled flows, the flow of a save and the command line agree, on every node.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.atomic import make_folder, read_uncached, replace_file
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.records import Record, decode_body, encode_body
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, WriteConcurrency, job_id


@dataclass(frozen=True)
class JobSettings(Record, format=ROOT_FORMAT):
    """The settings of a job."""

    keep: str = "all"
    """Retention policy of checkpoints, such as ``last=3,every=100``."""

    keep_weights: str = "last=2"
    """Retention policy of steps with weights only. The next one supersedes them, so two suffice."""

    keep_quarantine: str = "all"
    """Retention policy of quarantined and superseded steps, such as ``newer=30d``."""

    remote: str = ""
    """URL of the remote to which checkpoints are copied, such as ``s3://bucket/{job}``, where
    ``{job}`` stands for the job's identifier; empty for none. No credentials, one job for each URL.
    """

    remote_required: bool = False
    """Whether a checkpoint counts only once the remote has it. Otherwise a flow run of its own
    copies the checkpoint after the commit."""

    remote_keep: str = "all"
    """Retention policy of checkpoints in the remote: as ``keep``, without metrics."""

    write_concurrency: WriteConcurrency = "all"
    """Shards that are written at once: ``all``; ``per_rank``, one of each rank; ``per_node``, one
    on each node; ``one``, one of the job."""

    rank_timeout_s: Annotated[float, msgspec.Meta(gt=0, lt=253e9)] = 600.0
    """Seconds that a save waits for the images of all ranks and roles once it was requested."""

    @property
    def required_remote(self) -> str:
        """URL of the remote that must have the job's checkpoints; empty if none must."""
        return self.remote if self.remote_required else ""


NAMES = tuple(field.name for field in fields(JobSettings))
"""Names of all settings of a job."""


def read_job_settings(root: str | Path) -> JobSettings:
    """Read the settings of a job.

    Args:
        root: the job's root.

    Raises:
        CommitError: the file is torn, so it is unknown which steps to keep.
        FormatError: another release has written it.
    """
    return _to_settings(root, read_set_job_settings(root))


def read_set_job_settings(root: str | Path) -> dict[str, Any]:
    """Return the settings of a job that were set, by name; errors as `read_job_settings`."""
    path = _path(root)
    try:
        return decode_body(read_uncached(path), path, JobSettings.FORMAT, JobSettings.WRITER)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _torn(path) from error


def write_job_settings(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    """Change settings of a job; those that are not named stay as they are.

    Args:
        root: the job's root, which exists.
        changes: values by name, as in `JobSettings`; None restores the default. Texts are converted
            to the type of the setting.

    Returns:
        The settings of the job.

    Raises:
        ConfigError: a name is unknown, or a value has a wrong type.
        CommitError, FormatError: as in `read_job_settings`.
    """
    for name in changes:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
            raise ConfigError(f"{name} is not a setting of a job; {hint}")
    make_folder(_path(root).parent)
    with acquire_file_lock(_path(root).with_suffix(".lock")):
        return _write(root, changes)


def _write(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    before = read_set_job_settings(root)
    after = {name: value for name, value in {**before, **changes}.items() if value is not None}
    if remote := after.get("remote"):  # in full, so that it is the same on every node
        after["remote"] = str(remote).rstrip("/").replace("{job}", job_id(root))
    try:
        settings = msgspec.convert(after, JobSettings, strict=False)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise ConfigError(f"{given}: {error}; see trinity-sync jobs set --help") from error
    if settings.remote_required and not settings.remote:
        raise ConfigError("remote_required needs a remote; set remote as well")
    after = {name: value for name, value in msgspec.to_builtins(settings).items() if name in after}
    if after != before:
        replace_file(_path(root), encode_body(after, JobSettings.FORMAT, indent=1))
    return settings


def _to_settings(root: str | Path, values: Mapping[str, Any]) -> JobSettings:
    try:
        return msgspec.convert(values, JobSettings)
    except msgspec.ValidationError as error:
        raise _torn(_path(root)) from error


def _torn(path: Path) -> CommitError:
    return CommitError(
        f"{path} is torn, so the settings of the job are unknown, and nothing is removed or "
        "replicated by them. Remove the file and set them again: trinity-sync jobs set"
    )


def _path(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "job.json"
