"""What a save does on each of its nodes. Nothing here imports Prefect, which takes a CPU second."""

from collections.abc import Sequence

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.fs.rate_limit import RateLimit
from trinity_sync.layout import Component
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.storage.callable_saves import await_callable_saves, sync_callable_files
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted, discard, mark_failed


def make_save(request: SaveRequest) -> SaveId:
    """Return the save of a request, once this node's settings allow flows to work on its root.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(request.root)
    return request.save


def persist_component(
    request: SaveRequest,
    component: Component | None,
    shards: NodeShards,
    with_callables: bool = False,
) -> Persisted:
    """Persist the images of one component on one node, durably and under temporary names.

    Args:
        request: The save.
        component: The component; None if the node has callable saves only.
        shards: The shards that this node holds.
        with_callables: Also wait for the callable saves of this node, and sync their files.
    """
    stack, save = StackSettings(), make_save(request)
    spool = get_job_spool(shards.spool, save.root)  # refuses another job's, before anything is read
    rate = stack.io.max_mb_per_s * 1e6
    options = WriteOptions(
        limit=RateLimit(spool.folder.parent / ".write_rate", rate) if rate else None,
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
        nice=stack.worker.nice,
    )
    written = persist(shards, save, component, options) if component else []
    statuses = await_callable_saves(spool, save) if with_callables else []
    sync_callable_files(save, statuses)
    return Persisted(written, statuses)


def free_slots(request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards) -> None:
    """Free the slots of a committed save on a node that did not run the commit task.

    Args:
        request: The committed save.
        persisted: What was persisted on this node.
        shards: The shards that this node holds.
    """
    written = [file for result in persisted for file in result.written]
    save = make_save(request)
    free_committed_slots(get_job_spool(shards.spool, save.root), save, written)


def mark_images_failed(
    request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards, reason: str
) -> int:
    """Mark the images of a failed save on one node, and remove its temporary files.

    Later saves evict such images first. Until then, a retry of the flow run can persist them again.

    Args:
        request: The failed save.
        persisted: What was persisted on this node.
        shards: The shards that this node holds.
        reason: Why the save failed.

    Returns:
        Number of images of the save that are still in memory.
    """
    save = make_save(request)
    for result in persisted:
        discard(result.written)
    spool = get_job_spool(shards.spool, save.root)
    mark_failed(spool, save, reason)
    return sum(save.owns(each.ticket) for each in spool.read_step(save.run, save.step)[0])
