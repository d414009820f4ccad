"""Tasks of a save: persist on few nodes, commit, copy, and what the Prefect UI shows of them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from prefect import Task, get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State, TaskRun

from tasks.on_ray import run_on_node
from trinity_sync.layout import Component
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.run_page import (
    FailedTask,
    SaveFailure,
    StepOutcome,
    describe_failure,
    summarize_failure,
)
from trinity_sync.pipeline.save import COMMIT, PERSIST, UPLOAD, Part, Share
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.uncommitted import Persisted

logger = logging.getLogger(__name__)


async def persist(request: SaveRequest, share: Share, shards: NodeShards) -> Persisted:
    """Persist a share on the node that holds its images."""
    arguments = request, share, shards
    return await run_on_node(shards.node, request.root, on_node.persist_share, *arguments)


def repeat(part: Part) -> dict[str, Any]:
    """Return the options of a task that Prefect repeats as the order of a save says."""

    async def is_transient(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
        try:
            await state.aresult()
        except Exception as error:
            return part.transient(error) or type(error) is RuntimeError  # as `Part.repeat`
        return False

    return {
        "retries": len(part.repeats_after),
        "retry_delay_seconds": [*part.repeats_after],
        "retry_condition_fn": is_transient,
        "persist_result": False,
    }


PERSIST_TASKS: dict[Component | None, Task[[SaveRequest, Share, NodeShards], Any]] = {
    component: Task(
        persist,
        name=f"persist-{component or 'save-functions'}",
        description=f"Persist {component or 'the files of save functions'} on one node",
        **repeat(PERSIST),
    )
    for component in (*get_args(Component), None)
}
"""One task per component, so that the Prefect UI shows each by its name."""


@task(name="commit", **repeat(COMMIT))
async def commit_step(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    started_at: float,
    persisted_at: float,
) -> on_node.Committed:
    """Commit what the tasks of all nodes have persisted, then free the slots of a node.

    Arguments are those of `on_node.commit_step`.
    """
    arguments = (request, persisted, shards, started_at, persisted_at)
    done = await run_on_node(shards.node, request.root, on_node.commit_step, *arguments)
    get_run_logger().info("%s", done.summary)
    try:
        key = make_artifact_key("save", request.root)
        await acreate_markdown_artifact(key=key, markdown=done.page, description=done.summary)
    except Exception as error:  # the server is away, and the step is committed nevertheless
        logger.warning("%s is committed; cannot create its artifact: %r", request.run_name, error)
    return done


async def create_failure_artifact(
    request: SaveRequest,
    outcome: StepOutcome,
    reason: str,
    failed: Sequence[FailedTask],
    remaining: Mapping[str, int],
) -> None:
    """Show in the Prefect UI what failed, what is safe and what to do; never raises.

    ``remaining`` has the images of the save that are still in memory, by node.
    """
    try:
        newest = await run_in_thread(find_newest, request.root, request.kind)
        last = newest.step if newest else None
        failure = SaveFailure(outcome, reason, failed, last, remaining)
        await acreate_markdown_artifact(
            key=make_artifact_key("save", request.root),
            markdown=describe_failure(request, failure),
            description=summarize_failure(request, failure),
        )
    except Exception as error:
        logger.warning("%s failed; cannot create its artifact: %r", request.run_name, error)


@task(name="replicate", **repeat(UPLOAD))
async def replicate(root: str, step: int, url: str) -> None:
    """Upload a step to a remote, from any node, and show the steps in the remote."""
    done, plan = await run_on_node(None, root, on_node.replicate_step, root, step, url)
    await acreate_markdown_artifact(
        key=make_artifact_key("replicated", root),
        markdown=f"Step {step} of `{root}` is at `{done.url}`: {done.uploaded} files, "
        f"{format_bytes(done.nbytes)} sent in {done.seconds:.1f} s.\n\n"
        + "\n".join(
            f"- step {each.step}: {f'kept: {why}' if why else 'removed from the remote'}"
            for each, _, why in plan.describe()
        ),
    )


@task(name="upload-to-required-remote", **repeat(UPLOAD))
async def upload(root: str, step: int, url: str, node: str) -> None:
    """Upload a committed step to the required remote of its root."""
    await run_on_node(node, root, on_node.replicate_step, root, step, url)
