"""A Prefect server with its worker and Ray, in a few lines, for tests of all other parts together.

The server has one run for each idempotency key, with its state. The worker runs the real tasks of
``save-step`` in this process, one by one, so that a test decides what happens between two of them:
another attempt of the same run, a new save, a rewind. The order is that of ``flows.save``.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.errors import RootAwayError
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.on_node import (
    commit_step,
    persist_share,
    prune_after_commit,
    replicate_step,
)
from trinity_sync.orchestration.recovery.flow_runs import allow_eviction, find_orphaned_saves
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.pending import compare_late_images
from trinity_sync.pipeline.save import Share, mark_images_failed
from trinity_sync.saves.journal import SaveState, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.storage.job_settings import JobSettings, read_required_remote
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.save import Persisted

RANK_TIMEOUT_S = 0.03


def without_catalog_and_pages(patch: pytest.MonkeyPatch) -> None:
    """Leave out the SQL index and the pages of the Prefect UI, which no save or load reads."""
    patch.setattr(on_node, "try_mirror", lambda *_, **__: None)
    for name in ("describe_commit", "summarize_commit"):
        patch.setattr(on_node, name, lambda *_: "")
    # also of a root that is gone, with its settings
    hasty = JobSettings(rank_timeout_s=RANK_TIMEOUT_S)
    patch.setattr(pipeline, "read_job_settings", lambda _: hasty)


def save_step(request: SaveRequest, before_commit: Callable[[SaveRequest], None]) -> Iterator[str]:
    """What `flows.save.save_step` does; each task that has ended is told of."""
    nodes: list[NodeShards] = []
    persisted: list[Persisted] = []
    failures: list[Exception] = []
    try:
        nodes = await_node_shards(request.save, rank_timeout_s=RANK_TIMEOUT_S)
        yield "began"
        for shards in nodes:
            for component in request.components:
                try:  # the tasks are parallel: each of them ends, whatever becomes of the others
                    persisted.append(persist_share(request, Share(component), shards))
                except Exception as error:
                    failures.append(error)
                yield f"{component} is written"
        if failures:
            raise failures[0]
        before_commit(request)
        now = time.time()
        done = commit_step(request, persisted, nodes[0], now, now)
        yield "committed"
        url = read_required_remote(request.root)
        if url and request.kind == "checkpoint":
            replicate_step(request.root, request.step, url)
            yield "uploaded"
    except RootAwayError:
        raise
    except Exception as error:
        for shards in nodes:
            mark_images_failed(request, persisted, shards, str(error))
        raise
    if done.keep or request.kind != "checkpoint":
        prune_after_commit(request)
        yield "pruned"


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
            return attempt.throw(error) if error else next(attempt)
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
        attempt = save_step(run.request, self.before_commit)
        run.attempts.append(attempt)
        if run.state != "completed":
            run.state = "running"
            run.starts += 1
            run.tell("pending")
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
                allow_eviction(spool, {"request": request.model_dump()}, run.message)
            elif run.state == "crashed":
                run.state = "pending"  # it is begun again
            elif run.state == "completed":
                compare_late_images(spool, request)

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
