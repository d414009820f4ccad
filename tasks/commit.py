"""The last task of a save, and the one that notes its failure."""

import logging
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from tasks.persist import is_io_error, make_save
from tasks.weights import show_weights
from trinity_sync.catalog.mirror import try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.layout import FOLDERS
from trinity_sync.orchestration.job_registry import register_job
from trinity_sync.settings import Settings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.storage.block_reuse import can_reuse_blocks
from trinity_sync.storage.commit import commit
from trinity_sync.storage.export_requests import (
    ExportRequest,
    list_export_requests,
    write_export_request,
)
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.manifest import Manifest, read_own_manifest
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.receipts import await_receipts
from trinity_sync.storage.save import Persisted, Written, discard, mark_failed

logger = logging.getLogger(__name__)

MOST_ROWS = 200
"""Of a table in the Prefect UI, which is one request to the server."""


@task(
    name="commit",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=is_io_error,
    persist_result=False,
)
def commit_step(request: SaveRequest, parts: Sequence[Persisted], home: NodeShards) -> bool:
    """Wait for this node's functions, write manifest and iteration files, then free its slots.

    Args:
        request: of the save.
        parts: what the tasks of all nodes have made.
        home: what this node holds.

    Returns:
        Whether models of the step are to be exported.
    """
    save, settings = make_save(request), Settings()
    node = get_job_spool(home.spool, save.root)
    written = [file for part in parts for file in part.written]
    elsewhere = [receipt for part in parts for receipt in part.receipts]
    shards = sum(file.record.component not in FOLDERS for file in written)
    earlier = read_own_manifest(save.root, save.run, save.step)
    listed = len(earlier.receipts) if earlier else 0  # a retry after the commit finds them there
    receipts = await_receipts(
        node,
        save,
        at_least=max(0, request.expected - shards - listed - len(elsewhere)),
        gather_s=settings.gather_s,
    )
    write_export_requests(save, written)
    recycle = can_reuse_blocks(save.root, settings.recycle)
    manifest = commit(save, written, [*elsewhere, *receipts], recycle=recycle)
    free_committed_slots(node, save, written)
    try:
        register_job(settings, request.root)
    except OSError as error:
        logger.warning("scheduled flows do not know of %s: %s", request.root, error)
    try_mirror(settings, request.root, [request.step], flow_run=flow_run.id)
    try:
        show(request, manifest, written)
        show_weights(request.root)
    except Exception as error:  # the server is away, and the step is committed all the same
        logger.warning("%s is committed; its tables cannot be shown: %r", request.run_name, error)
    return bool(list_export_requests(request.root, step=request.step))


def write_export_requests(save: SaveId, written: Sequence[Written]) -> None:
    """Note which models the trainer wants to have exported; a retry finds it, whatever dies."""
    asked = {(file.record.role, file.export) for file in written if file.export}
    for role, export in asked:
        trusted = export == "hf_model with remote code"
        write_export_request(save.root, ExportRequest(save.run, save.step, role, trusted))


@task(name="free slots", persist_result=False)
def free_slots(request: SaveRequest, parts: Sequence[Persisted], share: NodeShards) -> None:
    """Free the slots of another node than the commit's, whose task does it at home.

    Args:
        request: of a save that is committed.
        parts: what the tasks of the node have made.
        share: what the node holds.
    """
    written = [file for part in parts for file in part.written]
    save = make_save(request)
    free_committed_slots(get_job_spool(share.spool, save.root), save, written)


@task(name="note failure", persist_result=False)
def note_failure(
    request: SaveRequest, parts: Sequence[Persisted], share: NodeShards, reason: str
) -> None:
    """Mark the save's images on a node as failed: a retry may write them, new saves come first.

    What the node has written of it goes: a retry writes it anew, and one that a later run has left
    behind is never retried.
    """
    save = make_save(request)
    for part in parts:
        discard(part.written)
    mark_failed(get_job_spool(share.spool, save.root), save, reason)


def show(request: SaveRequest, manifest: Manifest, written: Sequence[Written]) -> None:
    """Put the committed files into the run's page of the Prefect UI; of many, the largest."""
    seconds = {file.record.path: file.seconds for file in written}
    shown = sorted(manifest.files, key=lambda file: -file.nbytes)[:MOST_ROWS]
    left_out = len(manifest.files) - len(shown)
    create_table_artifact(
        key="committed-files",
        description=f"**{request.run_name}** committed: {manifest.nbytes:,} bytes in "
        f"`{request.root}/global_step_{request.step}`"
        + (f"; {left_out:,} smaller files are not shown" if left_out else ""),
        table=[
            {
                "file": file.path,
                "bytes": f"{file.nbytes:,}",
                "GB/s": f"{file.nbytes / seconds[file.path] / 1e9:.2f}"
                if seconds.get(file.path)
                else "",
                "digest": file.digest,
            }
            for file in sorted(shown, key=lambda file: file.path)
        ],
    )
