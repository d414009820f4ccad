"""The last task of a save, and the one that notes its failure."""

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from tasks.persist import save_of
from trinity_sync.catalog.mirror import try_mirror
from trinity_sync.orchestration.roots import note_root
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.commit import await_receipts, commit, release_slots
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.persist import Written, mark_failed

logger = logging.getLogger(__name__)


@task(name="commit", retries=2, retry_delay_seconds=2, persist_result=False)
def commit_step(request: SaveRequest, written: Sequence[Written], spool: str) -> None:
    """Wait for save functions, write manifest and iteration files, then free the slots."""
    save, settings = save_of(request), Settings()
    node = JobSpool(Path(spool))
    shards = sum(file.record.component != "metadata" for file in written)
    receipts = await_receipts(
        node,
        save,
        at_least=max(0, request.expected - shards),
        gather_s=settings.gather_s,
    )
    manifest = commit(save, written, receipts, recycle=settings.recycle)
    release_slots(node, save, written)
    try:
        note_root(settings, request.root)
    except OSError as error:
        logger.warning("scheduled flows do not know of %s: %s", request.root, error)
    try_mirror(settings, request.root, [request.step], flow_run=flow_run.id)
    try:
        show(request, manifest, written)
    except Exception as error:  # the server is away, and the step is committed all the same
        logger.warning("%s is committed; its table cannot be shown: %r", request.run_name, error)


@task(name="note failure", persist_result=False)
def note_failure(request: SaveRequest, spool: str, reason: str) -> None:
    """Mark the save's images on a node as failed: a retry may write them, new saves come first."""
    mark_failed(JobSpool(Path(spool)), save_of(request), reason)


def show(request: SaveRequest, manifest: Manifest, written: Sequence[Written]) -> None:
    """Put the committed files into the run's page of the Prefect UI."""
    seconds = {file.record.path: file.seconds for file in written}
    create_table_artifact(
        key="committed-files",
        description=f"**{request.run_name}** committed: {manifest.nbytes:,} bytes in "
        f"`{request.root}/global_step_{request.step}`",
        table=[
            {
                "file": file.path,
                "bytes": f"{file.nbytes:,}",
                "GB/s": f"{file.nbytes / seconds[file.path] / 1e9:.2f}"
                if seconds.get(file.path)
                else "",
                "digest": file.digest,
            }
            for file in manifest.files
        ],
    )
