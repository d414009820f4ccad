"""``verify``: read committed steps again on Ray and mark corrupted ones, or load the newest."""

from prefect import flow
from prefect_ray.context import remote_options

from flows.on_ray import NodeRayTaskRunner, gather_results, pin_to_this_node
from tasks.verify import choose_files, judge_steps, load_newest_checkpoints, read_files
from trinity_sync.storage.verify import split_evenly

READERS = 4
"""Tasks that read at a time."""


@flow(name="verify", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def verify(
    root: str | None = None,
    step: int | None = None,
    newest: int = 1,
    sample_gb: float = 0.0,
    seed: int | None = None,
    load: bool = False,
) -> None:
    """Read files of committed steps and compare their digests with the manifests.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed something
            on this node (or those of TRINITY_SYNC_MAINTAIN).
        step: Read this step, besides the newest ones.
        newest: Read so many of the newest steps of each job.
        sample_gb: Read about so many GB of all steps besides, other files each day.
        seed: Which part the sample is; empty for the number of the day.
        load: Load the newest checkpoint of each job as a restart would, all ranks' shards, and
            measure it, instead of reading files.
    """
    with remote_options(**pin_to_this_node()):  # it sees the roots, others may not
        if load:
            await gather_results([load_newest_checkpoints.submit(root)])
            return
        (files,) = await gather_results([choose_files.submit(root, step, newest, sample_gb, seed)])
        parts = [read_files.submit(part) for part in split_evenly(files, READERS)]
        checked = [one for part in await gather_results(parts) for one in part]
        await gather_results([judge_steps.submit(checked)])
