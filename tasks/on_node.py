"""What a save does on each of its nodes. Nothing here imports Prefect, which takes a CPU second."""

import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import TrinitySyncError
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


@dataclass(frozen=True)
class Share:
    """What one task persists on a node."""

    component: Component | None
    """None if the node has callable saves only."""
    awaits_callables: bool = False
    """Whether it also waits for the callable saves of the node: one task is enough."""

    @property
    def what(self) -> str:
        """The component, or what else it is."""
        return self.component or "callable saves"


@dataclass(frozen=True)
class Failure:
    """Why a share was not persisted."""

    error: Exception
    may_pass: bool = False
    """Whether it is worth a repetition, see `is_io_error`."""
    traceback: str = ""
    """Where it was raised on the node; empty if its message says what to do."""


def is_io_error(error: BaseException) -> bool:
    """Return whether an error is an I/O error, or was caused by one.

    An I/O error may be transient. A missing, corrupted or superseded image stays so.
    """
    return isinstance(error.__cause__ or error, OSError)


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


def persist_node(
    request: SaveRequest, shares: Sequence[Share], shards: NodeShards
) -> list[Persisted | Failure]:
    """Persist shares of one node in parallel; one that fails does not affect the others.

    Args:
        request: The save.
        shares: What is to be persisted.
        shards: The shards that this node holds.
    """
    with ThreadPoolExecutor(len(shares), "persist-node") as threads:
        return list(threads.map(partial(_try_persist, request, shards), shares))


def _try_persist(request: SaveRequest, shards: NodeShards, share: Share) -> Persisted | Failure:
    try:
        return persist_component(request, share.component, shards, share.awaits_callables)
    except Exception as error:
        expected = isinstance(error, TrinitySyncError)
        return Failure(error, is_io_error(error), "" if expected else traceback.format_exc())


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
