"""What the tasks of the flows do on a node, in Ray processes that do not import Prefect.

An outcome is what a function has returned or raised, in a form that can always be pickled.
"""

import logging
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

from trinity_sync.catalog import try_mirror
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.errors import PrefectApiError, TrinitySyncError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.job_registry import (
    require_allowed,
    require_allowed_store,
    select_roots,
)
from trinity_sync.orchestration.recovery.reconcile import read_unfinished_saves, reconcile
from trinity_sync.orchestration.root_threads import OTHERS_WAIT_S, RootVisits
from trinity_sync.orchestration.run_page import describe_commit, summarize_commit
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.save import PERSIST, Follows, Share
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import read_settings
from trinity_sync.snapshot.identity import register_root
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.gc import Finding
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import read_run_head
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save_timing import SaveTiming
from trinity_sync.storage.uncommitted import Persisted
from trinity_sync.storage.verify import (
    VerifiedStep,
    check_files,
    choose_files,
    judge_manifests,
    judge_steps,
    split_evenly,
)

if TYPE_CHECKING:
    from trinity_sync.remote.upload import Replicated

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def prune(
    root: str | None, given: Mapping[str, str], dry_run: bool
) -> dict[Path, RemovalPlan | str]:
    """Remove the steps that no policy keeps, root by root.

    None means the roots of all known jobs; ``given`` are policies as in `Rules.of_job`. Return what
    became of the steps of each root, or why it could not be pruned.

    Raises:
        ConfigError: This node's settings do not allow flows to work on the root.
    """
    settings, stack = read_settings()

    def prune_one(each: Path) -> RemovalPlan | str:
        try:
            rules = Rules.of_job(read_job_settings(each), **given)
            plan = plan_prune(each, rules)
            if dry_run:
                return plan
            done = prune_root(each, plan, spool=settings.spool, recycle=stack.io.reuse_files)
            try_mirror(settings, each, done.changed, stack)
            return done
        except (TrinitySyncError, OSError) as error:
            return str(error)

    roots = select_roots(root, settings, stack)
    return RootVisits("retention").visit(roots, prune_one, each_s=OTHERS_WAIT_S)


def replicate_step(root: str, step: int, url: str) -> tuple["Replicated", RemovalPlan]:
    """Copy a step to a remote and prune it, see `pipeline.save.replicate_step`."""
    require_allowed_store(url, read_settings()[1])
    return pipeline.replicate_step(root, step, url)


VERIFIERS = 4
"""Number of threads that read files."""


def verify(
    root: str | None, step: int | None, newest: int, sample_percent: float
) -> list[VerifiedStep]:
    """Read files of one job, or for None of all known jobs, and mark corrupted steps.

    These are all files of ``step`` and of the ``newest`` steps of each job, and a sample of about
    ``sample_percent`` of the bytes of all steps, others each day. Steps whose manifest is torn
    are returned as well.
    """
    settings, stack = read_settings()
    roots = select_roots(root, settings, stack)
    files = [
        file
        for each in roots
        for file in choose_files(
            each,
            step=step,
            newest=newest,
            sample=sample_percent / 100,
            seed=date.today().toordinal(),
        )
    ]
    check = partial(check_files, nice=stack.worker.nice)
    with ThreadPoolExecutor(VERIFIERS, "verify") as threads:
        checked = threads.map(check, split_evenly(files, VERIFIERS))
        judged = judge_steps([file for batch in checked for file in batch])
    return [*judged, *(torn for each in roots for torn in judge_manifests(each))]


def repair(root: str | None, grace_s: float) -> list[Finding]:
    """Repair what crashes left in the files of a job, or for None of all known jobs."""
    settings, stack = read_settings()
    found, runs = list[Finding](), None
    try:
        runs = ask_server(settings, read_unfinished_saves)
    except PrefectApiError as error:  # such as refused credentials
        found.append(Finding("Prefect", "runs", "left", f"cannot query the server: {error}"))
    return found + reconcile(settings, select_roots(root, settings, stack), runs, grace_s=grace_s)


class RemoteTracebackError(Exception):
    """The traceback of an error in a Ray process, as text; the cause of an error without one."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a function has returned or raised in a Ray process."""

    result: T | None = None
    error: Exception | None = None
    cause: BaseException | None = None
    """Cause of the error, which pickling the error loses."""
    traceback: str = ""

    def get_error(self) -> Exception | None:
        """Return the error with its cause, or None."""
        if self.error and not self.error.__cause__:
            cause = self.cause
            # an I/O error has no other cause: tasks are retried by it
            if cause is None and self.traceback and not isinstance(self.error, OSError):
                cause = RemoteTracebackError(self.traceback)
            self.error.__cause__ = cause
        return self.error

    def unwrap(self) -> T:
        """Return the result.

        Raises:
            Exception: The error, with its cause.
        """
        if error := self.get_error():
            raise error
        return cast(T, self.result)


def call(
    root: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Outcome[T]:
    """Call a function, and return its result or error in a form that can be pickled.

    A ``root`` that flows may not use on this node is refused.
    """
    try:
        if root is not None:
            require_allowed(root, read_settings()[1])
        return Outcome(function(*args, **kwargs))
    except Exception as error:
        text = traceback.format_exc()
        # errors such as those of HTTP clients cannot be pickled; tasks look at the class
        for cause in (error.__cause__, None):
            failed: Outcome[T] = Outcome(error=error, cause=cause, traceback=text)
            with suppress(Exception):
                pickle.loads(pickle.dumps(failed))
                return failed
        return Outcome(error=RemoteTracebackError(text), traceback=text)


@dataclass(frozen=True)
class Committed:
    """What a flow run shows of a save that it has committed, and what it does next."""

    page: str
    """Markdown."""
    summary: str
    follows: Follows
    by_saver: bool
    """Whether the saver of the node had committed it before."""
    timing: SaveTiming
    alarms: Sequence[str]
    """What is wrong with the values of the step, in words."""
    committed_at: float
    newest_of: Sequence[Kind]
    """Kinds whose latest pointer names the step."""


def persist_share(request: SaveRequest, share: Share, shards: NodeShards) -> Persisted:
    """Persist a share on the node that holds its images, see `pipeline.save.persist_share`."""
    return pipeline.persist_share(request, share, shards, read_settings()[1])


def persist_node(
    request: SaveRequest, shares: Sequence[Share], shards: NodeShards
) -> list[Outcome[Persisted]]:
    """Persist shares of one node in parallel; each is repeated, and fails, by itself."""

    def persist(share: Share) -> Outcome[Persisted]:
        work = partial(persist_share, request, share, shards)
        return call(None, PERSIST.repeat, work, f"{request.run_name}, {share.what}")

    with ThreadPoolExecutor(len(shares), "persist-node") as threads:
        return list(threads.map(persist, shares))


def commit_step(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    started_at: float,
    persisted_at: float,
) -> Committed:
    """Commit what the tasks of all nodes have persisted, then free the slots of this node.

    Times are in seconds since the epoch.
    """
    settings, stack = read_settings()
    manifest = pipeline.commit_images(request, persisted, shards, stack, started_at, persisted_at)
    try:
        register_root(settings.home, request.root)
    except OSError as error:
        logger.warning("cannot register %s for scheduled flows: %s", request.root, error)
    try_mirror(settings, request.root, [request.step], stack)
    written = [file for result in persisted for file in result.written]
    found = read_run_head(request.root, request.run, request.step)
    timings = found.timings if found else ()
    mine = [each for each in timings if (each.kind, each.roles) == (request.kind, request.roles)]
    by_saver = any(each.by_saver for each in mine)
    newest_of: list[Kind] = []
    with suppress(OSError):  # the step is committed nevertheless
        pointers = {kind: read_latest_pointer(request.root, kind) for kind in KINDS}
        newest_of = [kind for kind, step in pointers.items() if step == request.step]
    return Committed(
        describe_commit(request, manifest, written),
        summarize_commit(request, manifest),
        Follows.of(request, found),
        by_saver,
        manifest.timings[0],
        manifest.alarms,
        manifest.committed_at,
        newest_of,
    )


def prune_after_commit(request: SaveRequest) -> None:
    """Remove older steps after a save, see `pipeline.save.prune_after_commit`."""
    settings, stack = read_settings()
    done = pipeline.prune_after_commit(request, stack, settings.spool)
    try_mirror(settings, request.root, done.changed, stack)
