"""``save-step``: model, optimizer, extras and metadata in parallel on Ray, then the commit.

The flow's completion is the gate that Trinity's CheckpointMonitor used to be: every part's result
is asked for before the commit begins. What comes after it (the export of models that the trainer
asked for, the removal of older steps) may fail and be retried without touching the commit.
"""

import time

from prefect import flow, get_run_logger
from prefect_ray.context import remote_options
from prefect_ray.task_runners import RayTaskRunner

from flows.on_ray import on_node, results
from flows.replicate import ask_for_copy
from tasks.commit import commit_step, note_failure
from tasks.export import export_wished
from tasks.persist import PERSIST
from tasks.prune import prune_after_commit
from trinity_sync.orchestration import metrics  # a flow is pickled with its globals
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings


@flow(name="save-step", task_runner=RayTaskRunner(), persist_result=False, retries=0)
async def save_step(request: SaveRequest) -> None:
    """Write one step's images and commit them; then export models, if that was asked for.

    Args:
        request: the step, and the spools in which its images wait.
    """
    began, committed = time.perf_counter(), 0.0
    try:
        parts = []
        for node, spool in request.spools.items():
            with remote_options(**on_node(node)):
                parts += [
                    PERSIST[component].submit(request, component, spool)
                    for component in request.components
                ]
        written = [file for files in await results(parts) for file in files]
        persisted = time.perf_counter()
        node, spool = next(iter(request.spools.items()))
        with remote_options(**on_node(node)):
            commit = commit_step.submit(request, written, spool)
            (exports,) = await results([commit])
        committed = time.perf_counter()
        metrics.METRICS.committed(request, written, persisted - began, committed - persisted)
        try:
            if exports:  # the step counts already, whatever becomes of them
                with remote_options(**on_node(node)):
                    await results([export_wished.submit(request)])
        finally:
            await ask_for_copy(request, Settings().replicate_to)
    except Exception as error:
        if not committed:
            metrics.METRICS.failed(request)
        await _note_failure(request, str(error))
        raise
    if request.keep:
        await _prune(request, node)


async def _prune(request: SaveRequest, node: str) -> None:
    """Remove older checkpoints; where that fails, the save is committed all the same."""
    try:
        with remote_options(**on_node(node)):
            await results([prune_after_commit.submit(request)])
    except Exception as error:
        get_run_logger().error(
            "%s is committed; older steps cannot be removed: %s. The next save, or trinity-sync "
            "prune, tries again.",
            request.run_name,
            error,
        )


async def _note_failure(request: SaveRequest, reason: str) -> None:
    """Note it on each node that can be reached; what failed is raised, whatever comes of this."""
    for node, spool in request.spools.items():
        try:
            with remote_options(**on_node(node)):
                await results([note_failure.submit(request, spool, reason)])
        except Exception as error:
            get_run_logger().error("the failure cannot be noted on node %s: %s", node, error)
