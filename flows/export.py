"""``export``: write the model of a committed step in the Hugging Face format."""

from prefect import flow

from tasks.export import export_model


@flow(name="export", persist_result=False, retries=0)
async def export(
    root: str,
    step: int,
    role: str = "actor",
    dtype: str = "keep",
    max_shard_gb: float = 5.0,
    to: str | None = None,
) -> None:
    """Write the model of a committed step as a folder that ``from_pretrained`` loads.

    An export that was interrupted continues with the files that are missing.

    Args:
        root: Full path of the job's root folder.
        step: A committed step.
        role: Role whose model is exported.
        dtype: Data type of the exported weights: keep, bf16, fp16 or fp32. Any other than keep
            needs ``to``.
        max_shard_gb: Maximum size of a safetensors file in GB.
        to: Full path of a new folder; empty for the step's own folder, next to its configuration
            and tokenizer.
    """
    await export_model(root, step, role, dtype, max_shard_gb, to)
