"""The order of a save and of what follows its commit, for everything that drives saves.

A driver does the parts: in the flow ``save-step`` Prefect tasks on Ray, in the saver of a node its
threads (`SaverDriver`), in tests one that stops between two parts. It does not decide which part
comes next, or what an error stops: `ORDER` does, for all drivers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from trinity_sync.errors import RemoteError, RemovedStepError, RootAwayError, SaveError, is_of_stack
from trinity_sync.fs.atomic import WRONG_KIND
from trinity_sync.pipeline.save import (
    Share,
    commit_images,
    copy_missing_steps,
    export_requested_models,
    find_policy,
    free_slots,
    list_shares,
    mark_images_failed,
    persist_share,
    prune_after_commit,
    replicate_step,
)
from trinity_sync.pipeline.several_nodes import (
    NodeRecord,
    await_commit,
    await_node_records,
    find_node,
    remove_node_records,
    write_node_record,
)
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import compare_late_images
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import Manifest, read_run_head
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.uncommitted import Persisted

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
            prunes=not is_checkpoint or find_policy(request, manifest) not in ("", "all"),
        )


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
                if not self.transient(error):
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
