"""Remove steps: on a schedule, on request, or after a commit."""

import logging
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from trinity_sync.catalog.database import get_catalog_url, open_catalog
from trinity_sync.catalog.mirror import rebuild, try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration.job_registry import require_allowed, select_roots
from trinity_sync.orchestration.on_node.settings import read_settings, read_writing
from trinity_sync.orchestration.root_threads import OTHERS_WAIT_S, RootVisits
from trinity_sync.pipeline import save as pipeline
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.prune import Pruned
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.storage.job_settings import read_job_settings

logger = logging.getLogger(__name__)


def prune(
    root: str | None, keep: str, keep_weights: str, dry_run: bool, now: datetime | None
) -> list[Pruned | str]:
    """Remove the steps that no policy keeps, root by root.

    None means the roots of all known jobs, and an empty policy each job's own. Return what became
    of the steps of each root, or why it could not be pruned.

    Raises:
        ConfigError: This node's settings do not allow flows to work on the root.
    """
    settings, stack = read_settings()

    def prune_one(each: Path) -> Pruned | str:
        try:
            return prune_root(
                each,
                Rules.of_job(read_job_settings(each), keep=keep, keep_weights=keep_weights),
                now.timestamp() if now else time.time(),
                spool=settings.spool,
                recycle=stack.io.reuse_files,
                dry_run=dry_run,
                on_removed=partial(_update_catalog, each),
            )
        except (TrinitySyncError, OSError) as error:
            return f"{each}: {error}"

    roots = select_roots(root, settings, stack)
    return [*RootVisits("retention").visit(roots, prune_one, each_s=OTHERS_WAIT_S).values()]


def prune_after_commit(request: SaveRequest) -> None:
    """Remove older checkpoints after a save, see `pipeline.save.prune_after_commit`."""
    settings, stack = read_settings()
    require_allowed(request.root, stack)
    pipeline.prune_after_commit(
        request,
        read_writing(),
        settings.spool,
        on_removed=lambda steps: try_mirror(settings, request.root, steps, stack=stack),
    )


def _update_catalog(root: Path, _steps: Sequence[int]) -> None:
    try:
        with open_catalog(get_catalog_url(*read_settings())) as engine:
            rebuild(engine, root)
    except Exception as error:  # the catalog is best effort, the files count
        logger.warning("cannot update the catalog for %s: %s", root, error)
