"""The parts of a save on one node, and the driver of the saver; `order` has their order."""

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

from trinity_sync.errors import HiddenSpoolError, SaveError, TrinitySyncError
from trinity_sync.fs.atomic import NO_ROOM
from trinity_sync.fs.direct_io import RateLimit
from trinity_sync.layout import FOLDERS, Component
from trinity_sync.pipeline.order import COMMIT, NODES, PERSIST, UPLOAD, Driver, Follows, Part, drive
from trinity_sync.pipeline.several_nodes import (
    NodeRecord,
    await_commit,
    await_node_records,
    find_node,
    remove_node_records,
    write_node_record,
)
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import compare_late_images, end_images
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

T = TypeVar("T")


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
    request: SaveRequest, share: Share, shards: NodeShards, writing: NodeWriting
) -> Persisted:
    """Persist a share durably and under temporary names.

    A share that awaits save functions syncs their files, too.
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
    writing: NodeWriting,
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
            recycle=can_reuse_blocks(save.root, writing.reuse_files),
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


def find_follows(request: SaveRequest, manifest: Manifest | None) -> Follows:
    """Return what follows the commit of a save, whose manifest `read_run_head` has read."""
    job = read_job_settings(request.root)
    is_checkpoint = request.kind == "checkpoint"
    return Follows(
        exports=bool(manifest and manifest.exports),
        required_remote=job.required_remote if is_checkpoint else "",
        remote=job.remote if is_checkpoint and not job.required_remote else "",
        prunes=not is_checkpoint or _find_policy(request, manifest) not in ("", "all"),
    )


def _find_policy(request: SaveRequest, manifest: Manifest | None) -> str:
    """Return which steps a save, and the job if that was set, keep; empty for all checkpoints."""
    keep = manifest.keep if manifest and request.kind == "checkpoint" else 0
    policy = read_set_job_settings(request.root).get("keep")  # the default keeps all
    return ",".join(filter(None, (f"last={keep}" if keep else "", policy)))


def prune_after_commit(request: SaveRequest, writing: NodeWriting, spool: Path) -> RemovalPlan:
    """Remove all steps but those that the save of a step or a policy of the job keeps.

    The step of the request stays, also if newer steps were committed before it.
    """
    keep = _find_policy(request, read_run_head(request.root, request.run, request.step))
    rules = Rules.of_job(read_job_settings(request.root), keep=keep)
    plan = plan_prune(request.root, rules, just_committed=request.step)
    return prune(request.root, plan, spool=spool, recycle=writing.reuse_files)


class SaverDriver(Driver):
    """Saves what this node holds of a step, in this process and its threads.

    The node of rank 0 commits what all nodes have persisted; the others wait for its commit.
    ``spool`` and ``node`` are the node's.
    """

    def __init__(
        self, request: SaveRequest, writing: NodeWriting, spool: Path, node: str = ""
    ) -> None:
        super().__init__(request)
        self.commits = False
        """Whether this node commits the save."""
        self.refusal = ""
        """Why it fails, on all nodes, instead of being done."""
        self._writing, self._spool, self._node = writing, spool, node
        self._started_at = time.time()
        self._nodes: Sequence[NodeShards] = ()
        self._here = 0
        self._persisted: list[Persisted] = []
        self._has_persisted = False

    def save(self) -> None:
        """Do all parts.

        Raises:
            Exception: As `drive`.
        """
        with suppress(StopIteration):
            drive(self).send(None)  # no part waits for an event loop

    async def _find_nodes(self) -> None:
        request, nodes = self.request, self._repeat(NODES, self._await_nodes)
        self._here = find_node(request, nodes, self._spool / request.job, self._node)
        self._nodes, self._shards, self.commits = nodes, nodes[self._here], self._here == 0
        if len(nodes) > 1 and not request.components:
            raise SaveError(
                f"{request.run_name} of {request.root} is not committed: save functions alone, of "
                f"ranks on {len(nodes)} nodes, need the stack. See: trinity-sync up"
            )
        self._together = len(nodes) > 1 and not request.is_committed
        if self.refusal:
            raise SaveError(self.refusal)
        if self._together:
            write_node_record(request, self._here, NodeRecord())

    async def _persist(self) -> None:
        shares = list_shares(self.request, self._shards, commits=self.commits)
        with ThreadPoolExecutor(len(shares) or 1, "persist") as threads:  # 0 of functions alone
            persisting = [threads.submit(self._persist_share, share) for share in shares]
        self._persisted += [each.result() for each in persisting if not each.exception()]
        for each in persisting:
            each.result()
        self._has_persisted = True
        if self._here and self._together:
            written = tuple(file for each in self._persisted for file in each.written)
            statuses = tuple(each for one in self._persisted for each in one.statuses)
            write_node_record(self.request, self._here, NodeRecord(True, written, statuses))

    def _persist_share(self, share: Share) -> Persisted:
        call = partial(persist_share, self.request, share, self._shards, self._writing)
        return self._repeat(PERSIST, call, share.what)

    async def _commit(self) -> None:
        self._repeat(COMMIT, self._commit_all if self.commits else self._await_commit)

    def _commit_all(self) -> None:
        request, persisted = self.request, self._persisted
        if self._together:
            theirs = await_node_records(request, self._nodes, rank_timeout_s=self._limit_s)
            persisted = [*persisted, *theirs]
        arguments = request, persisted, self._shards, self._writing, self._started_at, time.time()
        commit_images(*arguments, by_saver=True)
        head = read_run_head(request.root, request.run, request.step)
        self.follows = find_follows(request, head)

    def _await_commit(self) -> None:
        if self._together:
            await_commit(self.request, self._nodes, rank_timeout_s=self._limit_s)
            free_slots(self.request, self._persisted, self._shards.spool)

    async def _release_nodes(self) -> None:
        """Remove the records of all nodes, whose savers free their slots."""
        if self.commits and len(self._nodes) > 1:
            remove_node_records(self.request)

    async def _upload(self) -> None:
        where = self.request.root, self.request.step, self.follows.required_remote
        self._repeat(UPLOAD, partial(replicate_step, *where))

    async def _mark_failed(self) -> None:
        request, reason = self.request, str(self.failure) or repr(self.failure)
        with suppress(OSError):
            if self._here and not self._has_persisted:
                write_node_record(request, self._here, NodeRecord(error=reason))
            elif len(self._nodes) > 1:  # before the files that it names
                remove_node_records(request, self._here or None)
        mark_images_failed(request, self._persisted, self._spool / request.job, reason)

    async def _export(self) -> None:
        export_requested_models(self.request)

    async def _copy(self) -> None:
        copy_missing_steps(self.request.root, self.request.step, self.follows.remote)

    async def _prune(self) -> None:
        prune_after_commit(self.request, self._writing, self._spool)

    async def _compare_late_images(self) -> None:
        compare_late_images(JobSpool(self._spool / self.request.job), self.request)

    def _repeat(self, part: Part, call: Callable[[], T], what: str = "") -> T:
        return part.repeat(call, f"{self.request.run_name}, {what or part.name}")
