"""The order of a save and of what follows its commit, for everything that drives saves.

A driver does the parts: in the flow ``save-step`` Prefect tasks on Ray, in the saver of a node its
threads, in tests one that stops between two parts. It does not decide which part comes next, or
what an error stops: `ORDER` does, for all drivers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from trinity_sync.errors import RemoteError, RemovedStepError, RootAwayError, is_of_stack
from trinity_sync.fs.atomic import WRONG_KIND
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.placement import NodeShards, await_node_shards

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
