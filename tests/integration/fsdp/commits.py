"""The bodies of the ``save-step`` flow in a thread of the trainer: everything but Prefect and Ray.

What is written, and how it is committed, is what the flow's tasks call.
"""

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.pipeline.save import Part, SaverDriver
from trinity_sync.saves.journal import append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.storage.placement import await_node_shards

T = TypeVar("T")


class CommitsHere(SaveTrigger):
    """Stands in for Prefect; saves are committed one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: queue.Queue[SaveRequest] = queue.Queue()
        self._known: set[str] = set()
        """Idempotency keys that have a flow run, which is never started again."""
        self._save_step = _save_step
        self._works, self._submits = threading.Lock(), threading.RLock()

    def submit(self, request: SaveRequest) -> None:
        with self._submits:
            if request.key not in self._known:
                self._known.add(request.key)
                self._requests.put(request)
                threading.Thread(target=self._work, daemon=True).start()

    def find_failures(
        self, requests: Sequence[SaveRequest], begun: Collection[str]
    ) -> dict[str, str]:
        return {}

    def _work(self) -> None:
        with self._works, suppress(queue.Empty):  # another thread may have done this one's
            while request := self._requests.get_nowait():
                append(request, "begun")
                try:
                    self._save_step(request)
                    append(request, "completed")
                except Exception as error:
                    append(request, "failed", repr(error))
                finally:
                    self._requests.task_done()

    def close(self) -> None:
        """Closing the coordinator waits: what the test removes then is not worked on."""
        self.finish()
        super().close()

    def finish(self) -> None:
        """Also wait for what follows a commit: its slots are free then, and old steps pruned."""
        self._requests.join()


def coordinator_of(
    root: Path, trigger: SaveTrigger | None = None, roles: Sequence[str] | None = None
) -> CheckpointCoordinator:
    """The coordinator of a rank, with a spool next to the root."""
    settings = Settings(spool=root.parent / "spool", home=root.parent)
    return CheckpointCoordinator.of_process_group(
        root, settings=settings, trigger=trigger or CommitsHere(), roles=roles
    )


class Fails(CommitsHere):
    """The saves of a step fail, or all of them."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self._step = step

    def submit(self, request: SaveRequest) -> None:
        if self._step in (None, request.step):
            append(request, "failed", "the disk is full")
        else:
            super().submit(request)


class CommitsWhenTold(CommitsHere):
    """Nothing is committed before the test calls `go`, as when Prefect's worker is slow."""

    def __init__(self) -> None:
        super().__init__()
        self._goes, self._submitted = False, list[SaveRequest]()

    def submit(self, request: SaveRequest) -> None:
        self._submitted.append(request)
        if self._goes:
            self.go()

    def go(self) -> None:
        self._goes = True
        for request in [*self._submitted]:  # those that are known do not begin again
            super().submit(request)


class _Once(SaverDriver):
    """What fails is not repeated."""

    def _repeat(self, part: Part, call: Callable[[], T], what: str = "") -> T:
        return call()


def _save_step(request: SaveRequest) -> None:
    (first, *_) = await_node_shards(request.save, rank_timeout_s=60)
    _Once(request, StackSettings(), Path(first.spool).parent).save()
