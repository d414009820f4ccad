"""``verify``: read committed steps again and mark corrupted ones, or load the newest step."""

from prefect import flow

from tasks.on_ray import gather_results
from tasks.verify import choose_files, load_newest_checkpoints, mark_steps, read_files
from trinity_sync.storage.verify import split_evenly

READERS = 4
"""Number of parallel tasks that read files."""


@flow(name="verify", persist_result=False, retries=0)
async def verify(
    root: str | None = None,
    step: int | None = None,
    newest: int = 1,
    sample_percent: float = 0.0,
    seed: int | None = None,
    load: bool = False,
) -> None:
    """Read files of committed steps and compare their digests with the manifests.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        step: Step to read in addition to the newest ones.
        newest: Number of newest steps to read, per job.
        sample_percent: Approximate percentage of the bytes of all steps that are read as well.
            Consecutive days read different files.
        seed: Which sample to read; empty for the number of the day.
        load: Load the newest checkpoint of each job as a restart would, with the shards of all
            ranks, and measure it, instead of reading files.
    """
    if load:
        await load_newest_checkpoints(root)
        return
    files = await choose_files(root, step, newest, sample_percent, seed)
    reads = [read_files(batch) for batch in split_evenly(files, READERS)]
    await mark_steps([file for batch in await gather_results(reads) for file in batch])
