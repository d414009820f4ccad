"""Copy a committed step to a remote, required or not."""

import logging
import time
from pathlib import Path

from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration.job_registry import require_allowed, require_allowed_store
from trinity_sync.remote.required import prune_remote, replicate_missing, replicate_required
from trinity_sync.remote.upload import Replicated, replicate
from trinity_sync.storage.job_settings import read_job_settings

logger = logging.getLogger(__name__)


def replicate_to_remote(
    root: str, step: int, url: str, keep_last: int
) -> tuple[Replicated, list[int]]:
    """Upload the files of a step that the remote lacks, then the manifest, and prune the remote.

    ``keep_last`` newest steps stay there; 0 keeps all. If ``url`` is the job's remote, its
    ``remote_keep`` counts as well. Also return the steps that were removed from the remote.
    """
    _require_allowed(root, url)
    job = read_job_settings(root)
    done = replicate(root, url, step, keep_last=keep_last)
    removed = [*done.removed]
    if url.rstrip("/") == job.remote:
        removed += prune_remote(Path(root), url, job.remote_keep, time.time())
    return done, removed


def upload_to_required_remote(root: str, step: int, url: str) -> None:
    """Upload a committed step to the required remote of its root.

    Then upload earlier steps that the remote lacks because it was away, and prune it. If that
    fails, the next save retries it.
    """
    _require_allowed(root, url)
    replicate_required(Path(root), url, step)
    try:
        replicate_missing(Path(root), url)
        prune_remote(Path(root), url, read_job_settings(root).remote_keep, time.time())
    except (TrinitySyncError, OSError) as error:
        logger.error(
            "uploaded step %d to %s; cannot upload earlier steps or prune there, the next save "
            "will retry: %s",
            step,
            url,
            error,
        )


def _require_allowed(root: str, url: str) -> None:
    require_allowed(root)
    require_allowed_store(url)
