"""The parts of a save on one node; `order` has their order, and the driver of the saver."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.errors import HiddenSpoolError, SaveError, TrinitySyncError
from trinity_sync.fs.atomic import NO_ROOM
from trinity_sync.fs.direct_io import RateLimit
from trinity_sync.layout import FOLDERS, Component
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import end_images
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.storage.block_reuse import can_reuse_blocks, remove_spares
from trinity_sync.storage.commit import commit, free_committed_slots, remove_uncommitted
from trinity_sync.storage.job_settings import read_job_settings, read_set_job_settings
from trinity_sync.storage.manifest import Manifest, read_run_head, read_run_manifest
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save_functions import await_save_functions
from trinity_sync.storage.save_timing import refuse_removed
from trinity_sync.storage.uncommitted import Persisted

if TYPE_CHECKING:
    from trinity_sync.remote.upload import Replicated

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """What one task persists on a node."""

    component: Component | None
    """None if the node has save functions only."""
    awaits_functions: bool = False
    """Whether it also waits for the save functions of the node: one task is enough."""

    @property
    def what(self) -> str:
        """The component, or what else it is."""
        return self.component or "save functions"


def list_shares(request: SaveRequest, shards: NodeShards, *, commits: bool) -> list[Share]:
    """Return what to persist on a node; one that ``commits`` awaits its save functions then."""
    shares = [
        Share(component)
        for component in request.components
        if component != "metadata" or shards.has_rank_0
    ]
    if commits:
        return shares
    first, *others = shares or [Share(None)]
    return [Share(first.component, awaits_functions=True), *others]


def persist_share(
    request: SaveRequest, share: Share, shards: NodeShards, stack: StackSettings
) -> Persisted:
    """Persist a share durably and under temporary names.

    A share that awaits save functions syncs their files, too.
    """
    save = request.save
    spool = get_job_spool(shards.spool, save)  # refuses another job's, before anything is read
    refuse_other_job(save, spool)
    _require_visible(save, shards, spool)
    rate = stack.io.max_mb_per_s * 1e6
    job = read_job_settings(save.root)
    options = WriteOptions(
        limit=RateLimit(spool.folder.parent / ".write_rate", rate) if rate else None,
        rank_timeout_s=job.rank_timeout_s,
        nice=stack.worker.nice,
        refuse_nonfinite=job.on_nonfinite == "refuse",
    )
    written = persist(shards, save, share.component, options) if share.component else []
    statuses = await_save_functions(spool, save) if share.awaits_functions else []
    return Persisted(written, statuses)


def _require_visible(save: SaveId, shards: NodeShards, spool: JobSpool) -> None:
    """Require that this process sees the memory of the trainer, unless the save is committed.

    Raises:
        HiddenSpoolError: it does not.
        SaveError: the save was committed and removed before.
    """
    if spool.has_run(save.run_key) or spool.read_step(save):
        return
    if read_run_manifest(save.root, save.run, save.step) is None:
        refuse_removed(save)
        raise HiddenSpoolError(
            f"{save}: the stack on node {shards.node} does not see the trainer's {spool.folder}: "
            "it has another /dev/shm (a container, Slurm's job_container/tmpfs), or a program has "
            "removed the folder. Start the stack where the training runs, or have both share the "
            "host's /dev/shm (--ipc=host)"
        )


def commit_images(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    stack: StackSettings,
    started_at: float,
    persisted_at: float,
    *,
    by_saver: bool = False,
) -> Manifest:
    """Commit what was persisted on all nodes, then free the slots of this one.

    Times are in seconds since the epoch: when the flow run started, and when all files were
    durable.

    Raises:
        SaveError: as `commit`; or a file cannot be written, and the cause is an OSError.
    """
    save = request.save
    spool = get_job_spool(shards.spool, save)
    refuse_other_job(save, spool)
    written = [file for result in persisted for file in result.written]
    statuses = [status for result in persisted for status in result.statuses]
    committed = read_run_manifest(save.root, save.run, save.step)
    if not (written or statuses or committed):
        refuse_removed(save)
    images = sum(file.record.component not in FOLDERS for file in written)
    earlier = len(committed.callables) if committed else 0  # a retry after the commit
    statuses += await_save_functions(
        spool,
        save,
        at_least=max(0, request.expected - images - earlier) - len(statuses),
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
    )
    try:
        manifest = commit(
            save,
            written,
            statuses,
            recycle=can_reuse_blocks(save.root, stack.io.reuse_files),
            started_at=started_at,
            persisted_at=persisted_at,
            by_saver=by_saver,
        )
    except OSError as error:
        if error.errno in NO_ROOM:
            remove_spares(save.root)  # which makes room for the next attempt
        error.filename = error.filename or os.fspath(save.folder)
        raise SaveError(
            f"{save}: its commit is not finished: {error}. Repair that; the images stay in the "
            f"spool: trinity-sync retry {save.root} {save.step}",
            path=Path(error.filename),
        ) from error
    free_committed_slots(spool, save, written)
    return manifest


def free_slots(request: SaveRequest, persisted: Sequence[Persisted], folder: str | Path) -> None:
    """Free the slots of a committed save on a node that did not run the commit.

    ``folder`` is that of the job in the node's spool.
    """
    written = [file for result in persisted for file in result.written]
    free_committed_slots(get_job_spool(folder, request.save), request.save, written)


def mark_images_failed(
    request: SaveRequest, persisted: Sequence[Persisted], folder: str | Path, reason: str
) -> int:
    """Remove the files of a failed save on one node, and `end_images`.

    Until later saves evict them, a retry of the flow run can persist the images again. ``folder``
    is as in `free_slots`. Return how many images of the save are still in memory.
    """
    save = request.save
    remove_uncommitted(save, [file for result in persisted for file in result.written])
    spool = get_job_spool(folder, save)
    end_images(spool, request, reason)
    return len(spool.read_save(save))


def export_requested_models(request: SaveRequest) -> None:
    """Export the models that the trainer requested with a committed save."""
    manifest = read_run_manifest(request.root, request.run, request.step)
    for role in manifest.list_missing_exports() if manifest else ():
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from trinity_sync.formats.hf_export import run_export_request  # imports torch

        run_export_request(request.root, request.run, request.step, role)


def replicate_step(root: str, step: int, url: str) -> "tuple[Replicated, RemovalPlan]":
    """Upload the files of a step that the remote lacks, then the manifest; `copy_missing_steps`.

    Also return what became of the steps in the remote.
    """
    from trinity_sync.remote.required import replicate_and_record  # imports fsspec

    return replicate_and_record(Path(root), url, step), copy_missing_steps(root, step, url)


def copy_missing_steps(root: str, step: int, url: str) -> RemovalPlan:
    """Upload the checkpoints that the job's remote lacks, and prune it after the save of a step.

    Nothing is done while another process does it, which then uploads this step as well. What fails
    is logged.
    """
    from trinity_sync.remote.prune import prune_remote
    from trinity_sync.remote.required import replicate_missing

    try:
        if replicate_missing(Path(root), url) is not None:
            rules = Rules.of_remote(read_job_settings(root), url)
            return prune_remote(root, url, rules, just_copied=step)
    except (TrinitySyncError, OSError) as error:
        logger.error(
            "step %d of %s is committed; cannot copy all that %s lacks, or prune it. The next save "
            "will retry, for the steps that are here then: %s",
            *(step, root, url, error),
        )
    return RemovalPlan((), (), {})


def find_policy(request: SaveRequest, manifest: Manifest | None) -> str:
    """Return which steps a save, and the job if that was set, keep; empty for all checkpoints."""
    keep = manifest.keep if manifest and request.kind == "checkpoint" else 0
    policy = read_set_job_settings(request.root).get("keep")  # the default keeps all
    return ",".join(filter(None, (f"last={keep}" if keep else "", policy)))


def prune_after_commit(request: SaveRequest, stack: StackSettings, spool: Path) -> RemovalPlan:
    """Remove all steps but those that the save of a step or a policy of the job keeps.

    The step of the request stays, also if newer steps were committed before it.
    """
    keep = find_policy(request, read_run_head(request.root, request.run, request.step))
    rules = Rules.of_job(read_job_settings(request.root), keep=keep)
    plan = plan_prune(request.root, rules, just_committed=request.step)
    return prune(request.root, plan, spool=spool, recycle=stack.io.reuse_files)
