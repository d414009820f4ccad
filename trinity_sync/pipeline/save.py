"""A save: the order of its parts and of what follows its commit, and what each does on a node.

A driver does the parts: in the flow ``save-step`` Prefect tasks on Ray, in the saver of a node its
threads (`SaverDriver`), in tests one that stops between two parts. It does not decide which part
comes next, or what an error stops: `ORDER` does, for all drivers.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from trinity_sync.errors import (
    HiddenSpoolError,
    RemoteError,
    RemovedStepError,
    RootAwayError,
    SaveError,
    TrinitySyncError,
    is_of_stack,
)
from trinity_sync.fs.atomic import NO_ROOM, WRONG_KIND
from trinity_sync.fs.direct_io import RateLimit
from trinity_sync.layout import FOLDERS, Component
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
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.runs import refuse_other_job
from trinity_sync.storage.save_functions import await_save_functions
from trinity_sync.storage.save_timing import refuse_removed
from trinity_sync.storage.uncommitted import Persisted

if TYPE_CHECKING:
    from trinity_sync.remote.upload import Replicated

logger = logging.getLogger(__name__)

T = TypeVar("T")


def is_io_error(error: BaseException) -> bool:
    """Return whether an error is an I/O error, or was caused by one.

    An I/O error may be transient. A missing, corrupted or superseded image stays so, and so does a
    link in the place of a file; what the stack cannot do, the saver does.
    """
    cause = error.__cause__ or error
    return isinstance(cause, OSError) and cause.errno not in WRONG_KIND and not is_of_stack(error)


@dataclass(frozen=True)
class Follows:
    """What follows a commit, by its manifest and the settings of its job; nothing by default."""

    exports: bool = False
    """Whether models of the step are to be exported."""
    required_remote: str = ""
    """URL of the remote without which the save does not count."""
    remote: str = ""
    """URL of the remote that gets a copy, if none is required."""
    prunes: bool = False
    """Whether the save or a policy of the job removes steps."""

    @classmethod
    def of(cls, request: SaveRequest, manifest: Manifest | None) -> "Follows":
        """Return what follows the commit of a save, whose manifest `read_run_head` has read."""
        job = read_job_settings(request.root)
        is_checkpoint = request.kind == "checkpoint"
        return cls(
            exports=bool(manifest and manifest.exports),
            required_remote=job.required_remote if is_checkpoint else "",
            remote=job.remote if is_checkpoint and not job.required_remote else "",
            prunes=not is_checkpoint or _find_policy(request, manifest) not in ("", "all"),
        )


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


class Driver:
    """Does the parts of one save: each has a method, as ``_commit``."""

    def __init__(self, request: SaveRequest) -> None:
        self.request = request
        self.follows = Follows()
        """What follows the commit of this driver; nothing if another one has committed."""
        self.failure: Exception | None = None
        """Why the save has failed, or what follows its commit."""
        self.removed = ""
        """That an earlier driver has committed it, and its step is gone, if so."""

    async def do(self, part: "Part") -> None:
        """Do a part, and repeat it as `Part.repeats_after` says."""
        await getattr(self, f"_{part.name}")()

    def log_error(self, text: str) -> None:
        """Log what has failed."""
        logger.error("%s", text)

    def _await_nodes(self) -> Sequence[NodeShards]:
        self._limit_s = read_job_settings(self.request.root).rank_timeout_s
        return await_node_shards(self.request.save, rank_timeout_s=self._limit_s)

    async def _tell_commit(self) -> None:
        """Report a commit before what follows; the saver reports when all has ended."""

    async def _compare_late_images(self) -> None:
        """Compare images that were submitted after the commit, unless a saver does."""


@dataclass(frozen=True)
class Part:
    """A part of a save."""

    name: str
    applies: Callable[[Driver], object] = lambda _: True
    after: Literal["success", "commit", "failure"] = "success"
    """Of all parts before it; of those of the save, whatever followed its commit; of the save."""
    fails: Literal["save", "run"] = "save"
    """What fails with it: the save, or its flow run or saver alone, as it is committed."""
    says: str = ""
    """What the log says if it fails; nothing else fails with it then."""
    repeats_after: tuple[int, ...] = ()
    """Seconds before each repetition after an error of the class that may be transient."""
    transient: Callable[[BaseException], bool] = is_io_error

    def repeat(self, call: Callable[[], T], what: str) -> T:
        """Call what does this part, and repeat it here after an error that may be transient."""
        for delay_s in self.repeats_after:
            try:
                return call()
            except Exception as error:
                if not self.transient(error) and type(error) is not RuntimeError:  # lacks threads
                    raise
                logger.warning("%s: again in %g s: %s", what, delay_s, error)
                time.sleep(delay_s)
        return call()


NODES = Part("find_nodes", repeats_after=(1, 5, 15))
PERSIST = Part("persist", repeats_after=(1, 5, 15))
COMMIT = Part("commit", repeats_after=(1, 5, 15))
UPLOAD = Part(
    "upload",
    lambda save: save.follows.required_remote,
    repeats_after=(10, 60, 300),
    transient=lambda error: isinstance(error, RemoteError),  # a corrupted step stays so
)
ORDER = (
    NODES,
    PERSIST,
    COMMIT,
    Part(
        "release_nodes",
        says="is committed; cannot free its slots on another node, where later saves evict them",
    ),
    UPLOAD,
    Part(
        "mark_failed",
        lambda save: not isinstance(save.failure, RootAwayError),  # it waits for its root
        after="failure",
        says="failed; cannot mark its images as failed on every node",
    ),
    Part("tell_commit", says="is committed; cannot report it"),
    Part("export", lambda save: save.follows.exports, fails="run"),
    Part(
        "copy",  # with the exported models, which are files of the step
        lambda save: save.follows.remote,
        after="commit",
        says="is committed; cannot copy it to the remote, the next save will retry",
    ),
    Part(
        "prune",
        lambda save: save.follows.prunes,
        after="commit",
        says="is committed; cannot remove older steps, the next save or trinity-sync prune will "
        "retry",
    ),
    Part(
        "compare_late_images",
        after="commit",
        says="is committed; cannot compare the images that were submitted after it",
    ),
)


async def drive(driver: Driver) -> None:
    """Do the parts of a save in their order.

    Raises:
        Exception: That of the part that has failed the save or the run.
    """
    stands: Literal["success", "commit", "failure"] = "success"
    for part in ORDER:
        is_due = part.after == stands or (part.after, stands) == ("commit", "success")
        if not (is_due and part.applies(driver)):
            continue
        try:
            await driver.do(part)
        except RemovedStepError as error:  # whoever committed it was killed before it could tell
            driver.removed, stands = str(error), "commit"
            logger.info("%s", error)
        except Exception as error:
            if part.says:
                driver.log_error(f"{driver.request.run_name} {part.says}: {error}")
                continue
            driver.failure = error
            stands = "failure" if part.fails == "save" else "commit"
    if driver.failure:
        raise driver.failure


class SaverDriver(Driver):
    """Saves what this node holds of a step, in this process and its threads.

    The node of rank 0 commits what all nodes have persisted; the others wait for its commit.
    ``spool`` and ``node`` are the node's.
    """

    def __init__(
        self, request: SaveRequest, stack: StackSettings, spool: Path, node: str = ""
    ) -> None:
        super().__init__(request)
        self.commits = False
        """Whether this node commits the save."""
        self.refusal = ""
        """Why it fails, on all nodes, instead of being done."""
        self._stack, self._spool, self._node = stack, spool, node
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

        def persist_shares() -> list[Future[Persisted]]:
            with ThreadPoolExecutor(len(shares) or 1, "persist") as threads:  # 0 of functions alone
                return [threads.submit(self._persist_share, share) for share in shares]

        persisting = self._repeat(PERSIST, persist_shares)
        self._persisted += [each.result() for each in persisting if not each.exception()]
        for each in persisting:
            each.result()
        self._has_persisted = True
        if self._here and self._together:
            written = tuple(file for each in self._persisted for file in each.written)
            statuses = tuple(each for one in self._persisted for each in one.statuses)
            write_node_record(self.request, self._here, NodeRecord(True, written, statuses))

    def _persist_share(self, share: Share) -> Persisted:
        call = partial(persist_share, self.request, share, self._shards, self._stack)
        return self._repeat(PERSIST, call, share.what)

    async def _commit(self) -> None:
        self._repeat(COMMIT, self._commit_all if self.commits else self._await_commit)

    def _commit_all(self) -> None:
        request, persisted = self.request, self._persisted
        if self._together:
            theirs = await_node_records(request, self._nodes, rank_timeout_s=self._limit_s)
            persisted = [*persisted, *theirs]
        arguments = request, persisted, self._shards, self._stack, self._started_at, time.time()
        commit_images(*arguments, by_saver=True)
        head = read_run_head(request.root, request.run, request.step)
        self.follows = Follows.of(request, head)

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
        prune_after_commit(self.request, self._stack, self._spool)

    async def _compare_late_images(self) -> None:
        compare_late_images(JobSpool(self._spool / self.request.job), self.request)

    def _repeat(self, part: Part, call: Callable[[], T], what: str = "") -> T:
        return part.repeat(call, f"{self.request.run_name}, {what or part.name}")


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


def _find_policy(request: SaveRequest, manifest: Manifest | None) -> str:
    """Return which steps a save, and the job if that was set, keep; empty for all checkpoints."""
    keep = manifest.keep if manifest and request.kind == "checkpoint" else 0
    policy = read_set_job_settings(request.root).get("keep")  # the default keeps all
    return ",".join(filter(None, (f"last={keep}" if keep else "", policy)))


def prune_after_commit(request: SaveRequest, stack: StackSettings, spool: Path) -> RemovalPlan:
    """Remove all steps but those that the save of a step or a policy of the job keeps.

    The step of the request stays, also if newer steps were committed before it.
    """
    keep = _find_policy(request, read_run_head(request.root, request.run, request.step))
    rules = Rules.of_job(read_job_settings(request.root), keep=keep)
    plan = plan_prune(request.root, rules, just_committed=request.step)
    return prune(request.root, plan, spool=spool, recycle=stack.io.reuse_files)
