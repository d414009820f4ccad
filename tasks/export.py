"""The tasks that export a model: what a save asked for, and what a person asks for."""

import os
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.settings import Settings
from trinity_sync.storage.export_requests import list_export_requests


@task(name="export", persist_result=False)
def export_requested(request: SaveRequest) -> None:
    """Export what the trainer asked for with a save that is committed now."""
    from trinity_sync.formats.hf_export import (
        run_export_request,  # torch takes seconds, and saves need it not
    )

    require_allowed(Settings(), request.root)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for wanted in list_export_requests(request.root, step=request.step):
        if wanted.run == request.run:
            run_export_request(request.root, wanted)


@task(name="export model", persist_result=False)
def export_model(
    root: str, step: int, role: str, dtype: str, max_shard_gb: float, to: str | None
) -> None:
    """Write one role's model of a committed step as a Hugging Face folder."""
    from trinity_sync.formats.hf_export import export_step  # as above

    for path in (root, *([to] if to else [])):
        require_allowed(Settings(), path)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    done = export_step(
        root,
        step,
        to=Path(to) if to else None,
        role=role,
        dtype=dtype,
        max_shard_bytes=int(max_shard_gb * 1e9),
    )
    create_markdown_artifact(
        key="exported-model",
        description=f"{role} of step {step} in `{root}`",
        markdown=f"`{done.folder}`: {done.nbytes:,} bytes\n\n"
        + "\n".join(f"- `{name}`" for name in done.files),
    )
