"""Commit a save, and free its slots on the node of the commit."""

import logging
import shutil
from collections.abc import Mapping, Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from tasks.on_node import make_save
from tasks.persist import has_io_error
from tasks.weights import create_weights_artifact
from trinity_sync.catalog.mirror import try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.layout import FOLDERS, KINDS, Kind
from trinity_sync.orchestration.job_registry import register_job
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.run_page import NodeResources, describe_commit, summarize_commit
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.storage.block_reuse import can_reuse_blocks
from trinity_sync.storage.callable_saves import await_callable_saves
from trinity_sync.storage.commit import commit
from trinity_sync.storage.export_requests import (
    ExportRequest,
    list_export_requests,
    write_export_request,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import Manifest, read_run_manifest
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted, Written

logger = logging.getLogger(__name__)


@task(
    name="commit",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=has_io_error,
    persist_result=False,
)
def commit_step(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    started_at: float,
    persisted_at: float,
) -> bool:
    """Commit what the tasks of all nodes have persisted, then free the slots of this node.

    Args:
        request: The save.
        persisted: The results of the persist tasks of all nodes.
        shards: The shards that this node holds.
        started_at: When the flow run started, in seconds since the epoch.
        persisted_at: When all files were durable, likewise.

    Returns:
        Whether models of the step are to be exported.
    """
    save, settings = make_save(request), Settings()
    spool = get_job_spool(shards.spool, save.root)
    written = [file for result in persisted for file in result.written]
    statuses = [status for result in persisted for status in result.statuses]
    statuses += await_callable_saves(
        spool,
        save,
        at_least=count_expected_callables(request, written) - len(statuses),
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
    )
    write_export_requests(save, written)
    recycle = can_reuse_blocks(save.root, StackSettings().io.reuse_files)
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
    try_mirror(settings, request.root, [request.step], flow_run=flow_run.id)
    try:
        create_commit_artifact(request, manifest, written, before, spool)
        create_weights_artifact(request.root)
    except Exception as error:  # the server is away, and the step is committed nevertheless
        logger.warning("%s is committed; cannot create its artifacts: %r", request.run_name, error)
    return bool(list_export_requests(request.root, step=request.step))


def count_expected_callables(request: SaveRequest, written: Sequence[Written]) -> int:
    """Return how many save functions must have started, at least.

    Args:
        request: The save.
        written: The files that the tasks of all nodes have written.
    """
    shards = sum(file.record.component not in FOLDERS for file in written)
    committed = read_run_manifest(request.root, request.run, request.step)
    earlier = len(committed.callables) if committed else 0  # a retry after the commit
    return max(0, request.expected - shards - earlier)


def write_export_requests(save: SaveId, written: Sequence[Written]) -> None:
    """Write down which models the trainer wants exported, so that a retry finds it.

    Args:
        save: The save.
        written: The files that the tasks of all nodes have written.
    """
    requested = {(file.record.role, file.export) for file in written if file.export}
    for role, export in requested:
        trusted = export == "hf_model with remote code"
        write_export_request(save.root, ExportRequest(save.run, save.step, role, trusted))


def create_commit_artifact(
    request: SaveRequest,
    manifest: Manifest,
    written: Sequence[Written],
    before: Mapping[Kind, int | None],
    spool: JobSpool,
) -> None:
    """Show in the Prefect UI how a save went.

    Args:
        request: The committed save.
        manifest: Its manifest.
        written: The files that the tasks of all nodes have written.
        before: Steps that the latest pointers named before the commit.
        spool: Spool of the job on this node.
    """
    after = _read_pointers(request.save)
    pointers = {kind: (before.get(kind), after[kind]) for kind in manifest.kinds}
    create_markdown_artifact(
        key=make_artifact_key("save", request.root),
        markdown=describe_commit(
            request, manifest, written, pointers, _measure_node(spool, request.save)
        ),
        description=summarize_commit(request, manifest),
    )


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
