"""The parts of a save that Ray runs on a node, with its settings and the catalog."""

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trinity_sync.catalog.mirror import try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.layout import KINDS, Component, Kind
from trinity_sync.orchestration.job_registry import register_job, require_allowed
from trinity_sync.orchestration.on_node.outcome import Outcome, call
from trinity_sync.orchestration.on_node.settings import read_settings, read_writing
from trinity_sync.orchestration.run_page import NodeResources, describe_commit, summarize_commit
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.save import Share
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.storage.export_requests import list_export_requests
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """What a flow run shows of a save that it has committed, and what it does next."""

    page: str
    """Markdown; empty if it cannot be made."""
    summary: str
    has_exports: bool
    """Whether models of the step are to be exported."""


def persist_component(
    request: SaveRequest,
    component: Component | None,
    shards: NodeShards,
    with_callables: bool = False,
) -> Persisted:
    """Persist the images of one component on one node, see `pipeline.save.persist_share`.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(request.root, read_settings()[1])
    share = Share(component, with_callables)
    return pipeline.persist_share(request, share, shards, read_writing())


def persist_node(
    request: SaveRequest, shares: Sequence[Share], shards: NodeShards
) -> list[Outcome[Persisted]]:
    """Persist shares of one node in parallel; one that fails does not affect the others."""

    def persist_share(share: Share) -> Outcome[Persisted]:
        return call(persist_component, request, share.component, shards, share.awaits_callables)

    with ThreadPoolExecutor(len(shares), "persist-node") as threads:
        return list(threads.map(persist_share, shares))


def commit_step(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    started_at: float,
    persisted_at: float,
    flow_run: str = "",
) -> Committed:
    """Commit what the tasks of all nodes have persisted, then free the slots of this node.

    Times are in seconds since the epoch; ``flow_run`` is the id of the flow run, for the catalog.
    """
    settings, stack = read_settings()
    require_allowed(request.root, stack)
    before = _read_pointers(request.save)
    manifest = pipeline.commit_images(
        request, persisted, shards, read_writing(), started_at, persisted_at
    )
    try:
        register_job(settings, request.root)
    except OSError as error:
        logger.warning("cannot register %s for scheduled flows: %s", request.root, error)
    try_mirror(settings, request.root, [request.step], stack=stack, flow_run=flow_run)
    written = [file for result in persisted for file in result.written]
    try:
        after = _read_pointers(request.save)
        pointers = {kind: (before.get(kind), after[kind]) for kind in manifest.kinds}
        resources = _measure_node(get_job_spool(shards.spool, request.save), request.save)
        page = describe_commit(request, manifest, written, pointers, resources)
    except OSError as error:  # the step is committed nevertheless
        logger.warning("%s is committed; cannot describe it: %s", request.run_name, error)
        page = ""
    exports = list_export_requests(request.root, step=request.step)
    return Committed(page, summarize_commit(request, manifest), bool(exports))


def free_slots(request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards) -> None:
    """Free the slots of a committed save on a node that did not run the commit."""
    require_allowed(request.root, read_settings()[1])
    pipeline.free_slots(request, persisted, shards)


def mark_images_failed(
    request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards, reason: str
) -> int:
    """Mark the images of a failed save on one node, see `pipeline.save.mark_images_failed`."""
    require_allowed(request.root, read_settings()[1])
    return pipeline.mark_images_failed(request, persisted, shards, reason)


def _read_pointers(save: SaveId) -> dict[Kind, int | None]:
    return {kind: read_latest_pointer(save.root, kind) for kind in KINDS}


def _measure_node(spool: JobSpool, save: SaveId) -> NodeResources:
    memory = shutil.disk_usage(spool.folder.parent)
    return NodeResources(
        pending=len(spool.tickets()[0]),
        spool_used=memory.used,
        spool_total=memory.total,
        disk_free=shutil.disk_usage(save.root).free,
    )
