"""``export``: the FSDP shards of a committed step as a model that ``from_pretrained`` loads."""

from prefect import flow
from prefect_ray.context import remote_options

from flows.on_ray import NodeRayTaskRunner, gather_results, pin_to_this_node
from tasks.export import export_model


@flow(name="export", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def export(
    root: str,
    step: int,
    role: str = "actor",
    dtype: str = "keep",
    max_shard_gb: float = 5.0,
    to: str | None = None,
) -> None:
    """Write a step's model as a Hugging Face folder; one that broke off is gone on with.

    Args:
        root: Full path of the job's root folder.
        step: A committed step.
        role: Whose model.
        dtype: Of the weights: keep, bf16, fp16 or fp32. Other than keep needs a folder of its own.
        max_shard_gb: Size in GB of a file of weights.
        to: Full path of a new folder; empty for the step's own, beside its config and tokenizer.
    """
    with remote_options(**pin_to_this_node()):
        await gather_results([export_model.submit(root, step, role, dtype, max_shard_gb, to)])
