"""Export models in the Hugging Face format."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.pipeline import save as pipeline

if TYPE_CHECKING:
    from trinity_sync.formats.hf_export import ExportResult


def export_requested_models(request: SaveRequest) -> None:
    """Export the models that the trainer requested with a committed save."""
    require_allowed(request.root)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    pipeline.export_requested_models(request)


def export_model(
    root: str, step: int, role: str, dtype: str, max_shard_gb: float, to: str | None
) -> "ExportResult":
    """Write one role's model of a committed step as a Hugging Face folder.

    ``dtype`` is keep, bf16, fp16 or fp32. ``to`` is the full path of a new folder; None for the
    step's own.
    """
    from trinity_sync.formats.hf_export import export_step  # imports torch, which is slow

    for path in (root, *([to] if to else [])):
        require_allowed(path)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return export_step(
        root,
        step,
        to=Path(to) if to else None,
        role=role,
        dtype=dtype,
        max_shard_bytes=int(max_shard_gb * 1e9),
    )
