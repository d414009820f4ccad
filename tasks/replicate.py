"""Copy a committed step to a remote, required or not."""

from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from tasks.on_ray import run_on_node
from trinity_sync.errors import RemoteError
from trinity_sync.orchestration.on_node import replicate as on_node
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key


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
async def replicate_to_remote(root: str, step: int, url: str, keep_last: int) -> None:
    """Upload a step to a remote, from any node."""
    arguments = (root, step, url, keep_last)
    done, removed = await run_on_node(None, on_node.replicate_to_remote, *arguments)
    pruned = f"; removed from the remote: steps {removed}" if removed else ""
    await acreate_markdown_artifact(
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
async def upload_to_required_remote(root: str, step: int, url: str, node: str) -> None:
    """Upload a committed step to the required remote of its root."""
    await run_on_node(node, on_node.upload_to_required_remote, root, step, url)
