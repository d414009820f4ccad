"""Export models in the Hugging Face format: those requested with a save, or by a user."""

from prefect import task
from prefect.artifacts import acreate_markdown_artifact

from tasks.on_ray import run_here, run_on_node
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.on_node import export as on_node
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key


@task(name="export-requested-models", persist_result=False)
async def export_requested_models(request: SaveRequest, node: str) -> None:
    """Export the models that the trainer requested with a committed save."""
    await run_on_node(node, on_node.export_requested_models, request)


@task(name="export-model", persist_result=False)
async def export_model(
    root: str, step: int, role: str, dtype: str, max_shard_gb: float, to: str | None
) -> None:
    """Write one role's model of a committed step as a Hugging Face folder."""
    done = await run_here(on_node.export_model, root, step, role, dtype, max_shard_gb, to)
    await acreate_markdown_artifact(
        key=make_artifact_key("exported-model", root),
        description=f"{role} of step {step} in `{root}`",
        markdown=f"`{done.folder}`: {format_bytes(done.nbytes)}\n\n"
        + "\n".join(f"- `{name}`" for name in done.files),
    )
