"""Persist and commit a save, free its slots, or mark its images as failed."""

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trinity_sync.catalog.mirror import try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.fs.rate_limit import RateLimit
from trinity_sync.layout import FOLDERS, KINDS, Component, Kind
from trinity_sync.orchestration.job_registry import register_job, require_allowed
from trinity_sync.orchestration.on_node.outcome import Outcome, call
from trinity_sync.orchestration.on_node.settings import read_settings
from trinity_sync.orchestration.run_page import NodeResources, describe_commit, summarize_commit
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.storage.block_reuse import can_reuse_blocks
from trinity_sync.storage.callable_saves import await_callable_saves, sync_callable_files
from trinity_sync.storage.commit import commit
from trinity_sync.storage.export_requests import (
    ExportRequest,
    list_export_requests,
    write_export_request,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import read_run_manifest
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save import Persisted, Written, discard, mark_failed
from trinity_sync.storage.save_log import refuse_removed

logger = logging.getLogger(__name__)


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


def is_io_error(error: BaseException) -> bool:
    """Return whether an error is an I/O error, or was caused by one.

    An I/O error may be transient. A missing, corrupted or superseded image stays so.
    """
    return isinstance(error.__cause__ or error, OSError)


@dataclass(frozen=True)
class Committed:
    """What a flow run shows of a save that it has committed, and what it does next."""

    page: str
    """Markdown; empty if it cannot be made."""
    summary: str
    has_exports: bool
    """Whether models of the step are to be exported."""


def make_save(request: SaveRequest) -> SaveId:
    """Return the save of a request, once this node's settings allow flows to work on its root.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(request.root, read_settings()[1])
    return request.save


def persist_component(
    request: SaveRequest,
    component: Component | None,
    shards: NodeShards,
    with_callables: bool = False,
) -> Persisted:
    """Persist the images of one component on one node, durably and under temporary names.

    ``component`` is None if the node has callable saves only. ``with_callables`` also waits for the
    node's callable saves, and syncs their files.
    """
    (_, stack), save = read_settings(), make_save(request)
    refuse_other_job(save)
    spool = get_job_spool(shards.spool, save)  # refuses another job's, before anything is read
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

    ``persisted`` has the results of all nodes. ``started_at`` (of the flow run) and
    ``persisted_at`` (all files durable) are seconds since the epoch; ``flow_run`` is for the
    catalog.
    """
    (settings, stack), save = read_settings(), make_save(request)
    refuse_other_job(save)
    spool = get_job_spool(shards.spool, save)
    written = [file for result in persisted for file in result.written]
    statuses = [status for result in persisted for status in result.statuses]
    if not (written or statuses or read_run_manifest(save.root, save.run, save.step)):
        refuse_removed(save)
    statuses += await_callable_saves(
        spool,
        save,
        at_least=count_expected_callables(request, written) - len(statuses),
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
    )
    write_export_requests(save, written)
    recycle = can_reuse_blocks(save.root, stack.io.reuse_files)
    before = _read_pointers(save)
    manifest = commit(
        save,
        written,
        statuses,
        recycle=recycle,
        started_at=started_at,
        persisted_at=persisted_at,
    )
    free_committed_slots(spool, save, written)
    try:
        register_job(settings, request.root)
    except OSError as error:
        logger.warning("cannot register %s for scheduled flows: %s", request.root, error)
    try_mirror(settings, request.root, [request.step], stack=stack, flow_run=flow_run)
    try:
        after = _read_pointers(save)
        pointers = {kind: (before.get(kind), after[kind]) for kind in manifest.kinds}
        resources = _measure_node(spool, save)
        page = describe_commit(request, manifest, written, pointers, resources)
    except OSError as error:  # the step is committed nevertheless
        logger.warning("%s is committed; cannot describe it: %s", request.run_name, error)
        page = ""
    exports = list_export_requests(request.root, step=request.step)
    return Committed(page, summarize_commit(request, manifest), bool(exports))


def count_expected_callables(request: SaveRequest, written: Sequence[Written]) -> int:
    """Return how many save functions must have started, at least.

    ``written`` are the files of all nodes.
    """
    shards = sum(file.record.component not in FOLDERS for file in written)
    committed = read_run_manifest(request.root, request.run, request.step)
    earlier = len(committed.callables) if committed else 0  # a retry after the commit
    return max(0, request.expected - shards - earlier)


def write_export_requests(save: SaveId, written: Sequence[Written]) -> None:
    """Write down which models the trainer wants exported, so that a retry finds it."""
    requested = {(file.record.role, file.export) for file in written if file.export}
    for role, export in requested:
        trusted = export == "hf_model with remote code"
        write_export_request(save.root, ExportRequest(save.run, save.step, role, trusted))


def free_slots(request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards) -> None:
    """Free the slots of a committed save on a node that did not run the commit.

    ``persisted`` has the results of this node only.
    """
    written = [file for result in persisted for file in result.written]
    save = make_save(request)
    free_committed_slots(get_job_spool(shards.spool, save), save, written)


def mark_images_failed(
    request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards, reason: str
) -> int:
    """Mark the images of a failed save on one node, and return how many are still in memory.

    Later saves evict such images first. Until then, a retry of the flow run can persist them again.
    Temporary files, of this node's ``persisted``, are removed.
    """
    save = make_save(request)
    for result in persisted:
        discard(result.written)
    spool = get_job_spool(shards.spool, save)
    mark_failed(spool, save, reason)
    return sum(save.owns(each.ticket) for each in spool.read_step(save.run, save.step)[0])


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
