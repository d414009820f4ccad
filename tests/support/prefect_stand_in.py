"""A Prefect server with its worker and Ray, in a few lines, for tests of all other parts together.

The server has one run for each idempotency key, with its state. The worker does the real parts of
``save-step`` in this process, one by one in their order, so that a test decides what happens
between two of them: another attempt of the same run, a new save, a rewind.
"""

import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.job import find_orphaned_saves
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import RootAwayError
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.on_node import (
    commit_step,
    persist_share,
    prune_after_commit,
    replicate_step,
)
from trinity_sync.orchestration.recovery.flow_runs import allow_eviction
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.save import (
    PERSIST,
    Driver,
    Part,
    Share,
    drive,
    export_requested_models,
    free_slots,
    mark_images_failed,
)
from trinity_sync.saves.journal import SaveState, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import compare_late_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.job_settings import JobSettings, read_job_settings
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.uncommitted import Persisted

RANK_TIMEOUT_S = 0.03


def without_catalog_and_pages(patch: pytest.MonkeyPatch) -> None:
    """Leave out the SQL index and the pages of the Prefect UI, which no save or load reads."""
    patch.setattr(on_node, "try_mirror", lambda *_, **__: None)
    for name in ("describe_commit", "summarize_commit"):
        patch.setattr(on_node, name, lambda *_: "")
    # also of a root that is gone, with its settings

    def read_hasty(root: str | Path) -> JobSettings:
        return replace(read_job_settings(root), rank_timeout_s=RANK_TIMEOUT_S)

    patch.setattr(pipeline, "read_job_settings", read_hasty)


class SteppedFlow(Driver):
    """Does in this process what `flows.save` has tasks do, and stops after each part."""

    def __init__(self, request: SaveRequest, before_commit: Callable[[SaveRequest], None]) -> None:
        super().__init__(request)
        self.fails: Exception | None = None
        """Error of the next part."""
        self._before_commit = before_commit
        self._nodes: Sequence[NodeShards] = ()
        self._persisted: list[Persisted] = []

    async def do(self, part: Part) -> None:
        if part is not PERSIST:
            self._fail()
        await super().do(part)
        if part is not PERSIST:
            await _Stop(part.name)

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error:
            raise error

    async def _find_nodes(self) -> None:
        self._nodes = await_node_shards(self.request.save, rank_timeout_s=RANK_TIMEOUT_S)

    async def _persist(self) -> None:
        failures: list[Exception] = []
        for shards in self._nodes:
            for component in self.request.components:
                try:  # the tasks are parallel: each ends, whatever becomes of the others
                    self._fail()
                    self._persisted.append(persist_share(self.request, Share(component), shards))
                except Exception as error:
                    failures.append(error)
                await _Stop(f"{component} is written")
        for error in failures:
            raise error

    async def _commit(self) -> None:
        self._before_commit(self.request)
        now = time.time()
        self.follows = commit_step(self.request, self._persisted, self._nodes[0], now, now).follows

    async def _release_nodes(self) -> None:
        for shards in self._nodes[1:]:
            free_slots(self.request, self._persisted, shards.spool)

    async def _upload(self) -> None:
        replicate_step(self.request.root, self.request.step, self.follows.required_remote)

    async def _mark_failed(self) -> None:
        for shards in self._nodes:
            reason = str(self.failure)
            mark_images_failed(self.request, self._persisted, shards.spool, reason)

    async def _export(self) -> None:
        export_requested_models(self.request)

    async def _copy(self) -> None:
        replicate_step(self.request.root, self.request.step, self.follows.remote)

    async def _prune(self) -> None:
        prune_after_commit(self.request)


@dataclass(frozen=True)
class _Stop:
    what: str

    def __await__(self) -> Iterator[str]:
        yield self.what


class FlowAttempt(Iterator[str]):
    """One attempt at a flow run; `next` does its next part, and returns what that was."""

    def __init__(self, driver: SteppedFlow) -> None:
        self._driver = driver
        self._parts: Coroutine[str, None, None] | None = None

    def __next__(self) -> str:
        self._parts = self._parts or drive(self._driver)
        return self._parts.send(None)

    def throw(self, error: Exception) -> str:
        """Have the next part fail."""
        self._driver.fails = error
        return next(self)

    def close(self) -> None:
        """Kill its process."""
        if self._parts:
            self._parts.close()


@dataclass
class FlowRun:
    """One run of the flow, with the attempts at it that are under way."""

    request: SaveRequest
    state: str = "pending"
    message: str = ""
    attempts: list[Iterator[str]] = field(default_factory=list)
    starts: int = 0

    def tell(self, state: SaveState) -> None:
        """Write into the journal of the root, as a worker does."""
        message = self.message if state == "failed" else ""
        append(self.request, state, message, start=self.starts)

    def crash(self) -> None:
        """Its process dies, and no worker retries it."""
        self.state, self.message = "crashed", "its process died"
        self.tell("failed")

    def advance(self, attempt: Iterator[str], error: Exception | None = None) -> str:
        """Run the next task of an attempt, or have it raise an error; tells what happened."""
        try:
            return attempt.throw(error) if error else next(attempt)  # type: ignore[attr-defined]
        except StopIteration:
            self.attempts.remove(attempt)
            self.state = "completed"
            self.tell("completed")
            return "completed"
        except RootAwayError as error:
            self.attempts.remove(attempt)
            self.state, self.message = "crashed", f"RootAwayError: {error}"
            return f"waits: {error}"
        except Exception as error:
            self.attempts.remove(attempt)
            if self.state != "completed":  # Prefect keeps that
                self.state, self.message = "failed", f"{type(error).__name__}: {error}"
                self.tell("failed")
            return f"failed: {error}"


class Server:
    """The runs by idempotency key, in the order in which they were asked for."""

    def __init__(self, before_commit: Callable[[SaveRequest], None] = lambda _: None) -> None:
        self.before_commit = before_commit
        self.runs: dict[str, FlowRun] = {}
        self.away = False
        self.clients: list[Trigger] = []

    def ask(self, request: SaveRequest) -> FlowRun:
        """A second request with a key gets the first one's run."""
        return self.runs.setdefault(request.key, FlowRun(request))

    def begin_due(self) -> list[tuple[FlowRun, Iterator[str]]]:
        """Begin the runs that wait; return them with their attempts."""
        due = [run for run in self.runs.values() if run.state == "pending"]
        return [(run, self.begin(run)) for run in due]

    def begin(self, run: FlowRun) -> Iterator[str]:
        """Begin an attempt: the first, a doubled one, or a retry."""
        attempt = FlowAttempt(SteppedFlow(run.request, self.before_commit))
        run.attempts.append(attempt)
        if run.state != "completed":
            run.state = "running"
            run.starts += 1
            run.tell("begun")
        return attempt

    def kill(self, run: FlowRun, attempt: Iterator[str]) -> None:
        """Kill the process of an attempt."""
        attempt.close()  # type: ignore[attr-defined]
        run.attempts.remove(attempt)
        if run.state == "running" and not run.attempts:
            run.crash()

    def make_trigger(self, settings: Settings) -> "Trigger":
        return Trigger(self)

    def end(self) -> None:
        """End what runs."""

    def recover_images(self, spool: Path) -> None:
        """What a node's worker does at every poll for the images that wait there."""
        found = find_orphaned_saves(spool, grace_s=0, clock=lambda: time.time() + 60)
        for request in sorted(found, key=lambda each: each.root):  # their folders' names are random
            run = self.ask(request)
            if run.state == "failed":
                allow_eviction(spool, request, run.message)
            elif run.state == "crashed":
                run.state = "pending"  # it is begun again
            elif run.state == "completed":
                compare_late_images(JobSpool(spool / request.job), request)

    def come_back(self) -> None:
        """The server is there again, and what trainers kept for it gets through."""
        self.away = False
        for client in self.clients:
            for request in client.waiting:
                self.ask(request)
            client.waiting.clear()


class Trigger(SaveTrigger):
    """A trainer's line to the server."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.waiting: list[SaveRequest] = []
        server.clients.append(self)

    def submit(self, request: SaveRequest) -> None:
        if self.server.away:
            self.waiting.append(request)
        else:
            self.server.ask(request)

    def find_failures(
        self, requests: Sequence[SaveRequest], begun: Collection[str]
    ) -> dict[str, str]:
        return {}

    def hang_up(self) -> None:
        """Its trainer has ended."""
        self.waiting.clear()
        if self in self.server.clients:
            self.server.clients.remove(self)
