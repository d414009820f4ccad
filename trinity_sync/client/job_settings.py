"""Change the settings of a job, after a check of the values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_sync.layout import check_type
from trinity_sync.retention.policies import WITHOUT_METRICS, parse_policy, refuse_metrics
from trinity_sync.storage.job_settings import JobSettings, write_job_settings


def set_job_settings(root: str | Path, changes: Mapping[str, Any]) -> JobSettings:
    """Change settings of a job in its root; those that are not named stay as they are.

    Args:
        root: the job's root, which exists.
        changes: values by name, as in `JobSettings`; None restores the default.

    Returns:
        The settings of the job.

    Raises:
        ConfigError: a name is unknown, or a value is invalid; nothing was changed.
    """
    check_type("job", changes, Mapping, "a dict, such as {'keep': 'last=3'}")
    for name in ("keep", "keep_model", "keep_weights", "keep_quarantine", "remote_keep"):
        if changes.get(name) is not None:
            parse_policy(str(changes[name]))
    for name in WITHOUT_METRICS:
        refuse_metrics(name, str(changes.get(name)))
    if remote := changes.get("remote"):
        from trinity_sync.remote.remote_root import LOCAL, Remote, parse_protocol  # import fsspec

        if parse_protocol(str(remote)) in LOCAL:  # others may need packages of the stack
            Remote(str(remote)).require_outside(Path(root))
    return write_job_settings(root, changes)
