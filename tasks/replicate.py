"""Copy a committed step into a store, or have it count there."""

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
from trinity_sync.remote.required import prune_remote, send, send_missing
from trinity_sync.remote.upload import replicate
from trinity_sync.settings import Settings

logger = logging.getLogger(__name__)


async def _store_was_away(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the store failed, which may pass; a step that is corrupted here stays so."""
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error, RemoteError)
    return False


@task(
    name="replicate",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_store_was_away,
    persist_result=False,
)
def replicate_step(root: str, step: int, url: str, keep_last: int) -> None:
    """Send what the store lacks of the step, then its manifest; show what it cost.

    In the remote of the settings, its policy holds.
    """
    _require_allowed(root, url)
    settings = Settings()
    done = replicate(root, url, step, keep_last=keep_last)
    gone = [*done.removed]
    if url.rstrip("/") == settings.remote_of(root).rstrip("/"):
        gone += prune_remote(Path(root), url, settings.remote_keep, time.time())
    removed = f"; removed there: steps {gone}" if gone else ""
    create_markdown_artifact(
        key="replicated",
        markdown=f"Step {step} of `{root}` is at `{done.url}`: {done.uploaded} files, "
        f"{done.nbytes:,} bytes sent in {done.seconds:.1f} s{removed}.",
    )


@task(
    name="to the store",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_store_was_away,
    persist_result=False,
)
def send_step(root: str, step: int, url: str) -> None:
    """Send the step of a save to the store in which it counts; then what else is missing there.

    The rest (steps that a store that was away did not get, retention there) is for the next save
    to try again, should it fail.
    """
    _require_allowed(root, url)
    send(Path(root), url, step)
    try:
        send_missing(Path(root), url)
        prune_remote(Path(root), url, Settings().remote_keep, time.time())
    except (TrinitySyncError, OSError) as error:
        logger.error("step %d is in %s; what else is to be done there failed: %s", step, url, error)


def _require_allowed(root: str, url: str) -> None:
    settings = Settings()
    require_allowed(settings, root)
    require_allowed_store(settings, url)
