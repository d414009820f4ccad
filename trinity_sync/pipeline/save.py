"""Persist and commit a save, free its slots or mark its images as failed, and what follows."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from trinity_sync.errors import HiddenSpoolError, RootAwayError, SaveError, TrinitySyncError
from trinity_sync.fs.direct_io import RateLimit
from trinity_sync.layout import FOLDERS, Component
from trinity_sync.pipeline.several_nodes import (
    NodeRecord,
    await_commit,
    await_node_records,
    find_node,
    is_committed,
    remove_node_records,
    write_node_record,
)
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.storage.block_reuse import can_reuse_blocks
from trinity_sync.storage.commit import commit, free_committed_slots
from trinity_sync.storage.export_requests import list_missing_exports
from trinity_sync.storage.job_settings import (
    read_job_settings,
    read_required_remote,
    read_set_job_settings,
)
from trinity_sync.storage.manifest import Manifest, read_manifest, read_run_manifest
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save import Persisted, discard, mark_failed
from trinity_sync.storage.save_functions import await_callable_saves
from trinity_sync.storage.save_timing import refuse_removed

if TYPE_CHECKING:
    from trinity_sync.remote.upload import Replicated

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAYS_S = (1, 5, 15)
"""Seconds before each repetition of what failed with an I/O error."""


@dataclass(frozen=True)
class NodeWriting:
    """How a node writes."""

    max_mb_per_s: float = 0.0
    """Speed limit of all writers of the node together; 0 for none."""
    nice: int = 19
    reuse_files: bool | Literal["always"] = True
    """Whether files of removed steps are written over."""

    @classmethod
    def of(cls, stack: StackSettings) -> "NodeWriting":
        """Return how the settings of a node have it write."""
        return cls(stack.io.max_mb_per_s, stack.worker.nice, stack.io.reuse_files)


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


def list_shares(request: SaveRequest, shards: NodeShards, *, commits: bool) -> list[Share]:
    """Return what to persist on a node; one that ``commits`` awaits its callables then."""
    shares = [
        Share(component)
        for component in request.components
        if component != "metadata" or shards.has_rank_0
    ]
    if commits:
        return shares
    first, *others = shares or [Share(None)]
    return [Share(first.component, awaits_callables=True), *others]


def is_io_error(error: BaseException) -> bool:
    """Return whether an error is an I/O error, or was caused by one.

    An I/O error may be transient. A missing, corrupted or superseded image stays so.
    """
    return isinstance(error.__cause__ or error, OSError)


def persist_share(
    request: SaveRequest, share: Share, shards: NodeShards, writing: NodeWriting
) -> Persisted:
    """Persist a share durably and under temporary names.

    A share that awaits callables syncs their files, too.
    """
    save = request.save
    spool = get_job_spool(shards.spool, save)  # refuses another job's, before anything is read
    refuse_other_job(save, spool)
    _require_visible(save, shards, spool)
    rate = writing.max_mb_per_s * 1e6
    job = read_job_settings(save.root)
    options = WriteOptions(
        limit=RateLimit(spool.folder.parent / ".write_rate", rate) if rate else None,
        rank_timeout_s=job.rank_timeout_s,
        nice=writing.nice,
        refuse_nonfinite=job.on_nonfinite == "refuse",
    )
    written = persist(shards, save, share.component, options) if share.component else []
    statuses = await_callable_saves(spool, save) if share.awaits_callables else []
    return Persisted(written, statuses)


def _require_visible(save: SaveId, shards: NodeShards, spool: JobSpool) -> None:
    """Require that this process sees the memory of the trainer, unless the save is committed.

    Raises:
        HiddenSpoolError: it does not.
        SaveError: the save was committed and removed before.
    """
    if spool.has_run(save.run_key) or spool.read_step(save.run, save.step)[0]:
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
    writing: NodeWriting,
    started_at: float,
    persisted_at: float,
    *,
    by_saver: bool = False,
) -> Manifest:
    """Commit what was persisted on all nodes, then free the slots of this one.

    Times are in seconds since the epoch: when the flow run started, and when all files were
    durable.
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
    statuses += await_callable_saves(
        spool,
        save,
        at_least=max(0, request.expected - images - earlier) - len(statuses),
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
    )
    manifest = commit(
        save,
        written,
        statuses,
        recycle=can_reuse_blocks(save.root, writing.reuse_files),
        started_at=started_at,
        persisted_at=persisted_at,
        by_saver=by_saver,
    )
    free_committed_slots(spool, save, written)
    return manifest


def free_slots(request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards) -> None:
    """Free the slots of a committed save on a node that did not run the commit."""
    written = [file for result in persisted for file in result.written]
    free_committed_slots(get_job_spool(shards.spool, request.save), request.save, written)


def mark_images_failed(
    request: SaveRequest, persisted: Sequence[Persisted], shards: NodeShards, reason: str
) -> int:
    """Mark the images of a failed save on one node, and remove its temporary files.

    Later saves evict such images first. Until then, a retry of the flow run can persist them again.
    Return the number of images of the save that are still in memory.
    """
    save = request.save
    for result in persisted:
        discard(result.written)
    spool = get_job_spool(shards.spool, save)
    mark_failed(spool, save, reason)
    return sum(save.owns(each.ticket) for each in spool.read_step(save.run, save.step)[0])


def export_requested_models(request: SaveRequest) -> None:
    """Export the models that the trainer requested with a committed save."""
    manifest = read_run_manifest(request.root, request.run, request.step)
    for role in list_missing_exports(manifest) if manifest else ():
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
            return prune_remote(root, url, rules, time.time(), just_copied=step)
    except (TrinitySyncError, OSError) as error:
        logger.error(
            "step %d of %s is committed; cannot copy all that %s lacks, or prune it. The next save "
            "will retry, for the steps that are here then: %s",
            *(step, root, url, error),
        )
    return RemovalPlan((), (), {})


def prune_after_commit(request: SaveRequest, writing: NodeWriting, spool: Path) -> RemovalPlan:
    """Remove all steps but those that the save of a step or a policy of the job keeps.

    The step of the request stays, also if newer steps were committed before it.
    """
    policy = read_set_job_settings(request.root).get("keep")  # the default keeps all
    read_head, is_checkpoint = partial(read_manifest, ranks=()), request.kind == "checkpoint"
    found = read_run_manifest(request.root, request.run, request.step, read=read_head)
    kept = [f"last={found.keep}"] if found and found.keep and is_checkpoint else []
    kept += [policy] if policy else []
    if is_checkpoint and kept in ([], ["all"]):
        return RemovalPlan((), (), {})
    rules = Rules.of_job(read_job_settings(request.root), keep=",".join(kept))
    plan = plan_prune(request.root, rules, time.time(), just_committed=request.step)
    return prune(request.root, plan, spool=spool, recycle=writing.reuse_files)


def run_save(
    request: SaveRequest,
    writing: NodeWriting,
    spool: Path,
    *,
    node: str = "",
    delays_s: Sequence[float] = RETRY_DELAYS_S,
) -> bool:
    """Save what this node holds of a step, in this process; ``spool`` and ``node`` are the node's.

    The node of rank 0 commits what all nodes have persisted; the others wait for its commit. Return
    whether this node has committed. What fails with an I/O error is repeated after ``delays_s``.

    Raises:
        Exception: as the parts; what is not committed is marked as failed then. Copies to a remote
            that is not required, and removals, go on after an export that fails, and are retried by
            the next save.
    """
    started_at, persisted = time.time(), list[Persisted]()
    limit_s = read_job_settings(request.root).rank_timeout_s
    nodes = await_node_shards(request.save, rank_timeout_s=limit_s)
    here = find_node(request, nodes, spool / request.job, node)
    shards, together = nodes[here], len(nodes) > 1 and not is_committed(request)
    has_persisted = False
    try:
        if len(nodes) > 1 and not request.components:
            raise SaveError(
                f"{request.run_name} of {request.root} is not committed: save functions alone, of "
                f"ranks on {len(nodes)} nodes, need the stack. See: trinity-sync up"
            )
        if together:
            write_node_record(request, here, NodeRecord())
        _persist_node(request, shards, writing, delays_s, persisted)
        has_persisted = True
        if here and together:
            write_node_record(request, here, NodeRecord.of(persisted))
            await_commit(request, nodes, rank_timeout_s=limit_s)
            free_slots(request, persisted, shards)
        if here:
            return False
        theirs = await_node_records(request, nodes, rank_timeout_s=limit_s) if together else []
        arguments = (request, [*persisted, *theirs], shards, writing, started_at, time.time())
        committing = partial(commit_images, *arguments, by_saver=True)
        _repeat(f"{request.run_name}, commit", delays_s, committing)
        if len(nodes) > 1:
            remove_node_records(request)
        is_checkpoint = request.kind == "checkpoint"
        required = read_required_remote(request.root) if is_checkpoint else None
        if required:
            replicate_step(request.root, request.step, required)
    except Exception as error:
        if here and not has_persisted:
            with suppress(OSError):
                write_node_record(request, here, NodeRecord(error=str(error)))
        elif len(nodes) > 1:  # before the files that it names
            remove_node_records(request, here or None)
        with suppress(OSError):  # shared memory is full; the error to be seen is that of the save
            if not isinstance(error, RootAwayError):
                mark_images_failed(request, persisted, shards, str(error))
        raise
    try:
        export_requested_models(request)
    finally:
        try:
            job = read_job_settings(request.root)
            if is_checkpoint and job.remote and not required:
                copy_missing_steps(request.root, request.step, job.remote)
            prune_after_commit(request, writing, spool)
        except (TrinitySyncError, OSError) as error:
            logger.error(
                "%s is committed; cannot remove older steps, the next save will retry: %s",
                request.run_name,
                error,
            )
    return True


def _persist_node(
    request: SaveRequest,
    shards: NodeShards,
    writing: NodeWriting,
    delays_s: Sequence[float],
    persisted: list[Persisted],
) -> None:
    """Persist what a node holds, and add the results to ``persisted``, also if a share fails."""
    shares = list_shares(request, shards, commits=False)
    with ThreadPoolExecutor(len(shares), "persist") as threads:
        persisting = [
            threads.submit(
                _repeat,
                f"{request.run_name}, {share.what}",
                delays_s,
                partial(persist_share, request, share, shards, writing),
            )
            for share in shares
        ]
    persisted += [each.result() for each in persisting if not each.exception()]
    for each in persisting:
        each.result()


def _repeat(what: str, delays_s: Sequence[float], call: Callable[[], T]) -> T:
    for delay_s in delays_s:
        try:
            return call()
        except Exception as error:
            if not is_io_error(error):
                raise
            logger.warning("%s: again in %g s: %s", what, delay_s, error)
            time.sleep(delay_s)
    return call()
