"""Copy a committed step to a remote, required or not."""

import logging
import time
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from trinity_sync.errors import RemoteError, TrinitySyncError
from trinity_sync.orchestration.job_registry import require_allowed, require_allowed_store
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key
from trinity_sync.remote.required import prune_remote, replicate_missing, replicate_required
from trinity_sync.remote.upload import replicate
from trinity_sync.storage.job_settings import read_job_settings

logger = logging.getLogger(__name__)


async def _is_remote_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether the remote failed, which may be transient; a corrupted step stays so."""
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error, RemoteError)
    return False


@task(
    name="replicate",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_is_remote_error,
    persist_result=False,
)
def replicate_to_remote(root: str, step: int, url: str, keep_last: int) -> None:
    """Upload the files of a step that the remote lacks, then the manifest.

    If ``url`` is the job's remote, also prune it by its ``remote_keep``.

    Args:
        root: Full path of the job's root folder.
        step: A committed step.
        url: URL of the job's folder in the remote, without credentials.
        keep_last: Number of newest steps to keep in the remote; 0 keeps all.
    """
    _require_allowed(root, url)
    job = read_job_settings(root)
    done = replicate(root, url, step, keep_last=keep_last)
    removed = [*done.removed]
    if url.rstrip("/") == job.remote:
        removed += prune_remote(Path(root), url, job.remote_keep, time.time())
    pruned = f"; removed from the remote: steps {removed}" if removed else ""
    create_markdown_artifact(
        key=make_artifact_key("replicated", root),
        markdown=f"Step {step} of `{root}` is at `{done.url}`: {done.uploaded} files, "
        f"{format_bytes(done.nbytes)} sent in {done.seconds:.1f} s{pruned}.",
    )


@task(
    name="upload-to-required-remote",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_is_remote_error,
    persist_result=False,
)
def upload_to_required_remote(root: str, step: int, url: str) -> None:
    """Upload a committed step to the required remote of its root.

    Then upload earlier steps that the remote lacks because it was away, and prune it. If that
    fails, the next save retries it.

    Args:
        root: Full path of the job's root folder.
        step: A committed step.
        url: URL of the job's folder in the remote, without credentials.
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
