"""Copy a committed step to a remote, required or not."""

from trinity_sync.orchestration.job_registry import require_allowed, require_allowed_store
from trinity_sync.pipeline import save as pipeline
from trinity_sync.remote.upload import Replicated


def replicate_to_remote(
    root: str, step: int, url: str, keep_last: int
) -> tuple[Replicated, list[int]]:
    """Copy a step to a remote and prune it, see `pipeline.save.replicate_step`."""
    _require_allowed(root, url)
    return pipeline.replicate_step(root, step, url, keep_last)


def upload_to_required_remote(root: str, step: int, url: str) -> None:
    """Upload a step, see `pipeline.save.upload_to_required_remote`."""
    _require_allowed(root, url)
    pipeline.upload_to_required_remote(root, step, url)


def _require_allowed(root: str, url: str) -> None:
    require_allowed(root)
    require_allowed_store(url)
