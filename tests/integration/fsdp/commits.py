"""The bodies of the ``save-step`` flow in a thread of the trainer: everything but Prefect and Ray.

What is written, and how it is committed, is what the flow's tasks call. These import Prefect, so in
a trainer's environment a process of the stack's environment does the same.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.save_trigger import Outcome, SaveTrigger
from trinity_sync.formats.hf_export import run_export_request
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.callable_saves import await_callable_saves
from trinity_sync.storage.commit import commit
from trinity_sync.storage.export_requests import list_export_requests
from trinity_sync.storage.late_images import free_committed_slots
from trinity_sync.storage.placement import await_node_shards


class CommitsHere(SaveTrigger):
    """Stands in for Prefect; saves are committed one after the other, as slowly as is asked.

    Settings of the writer come from the environment, as in a Ray worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requests: queue.Queue[SaveRequest] = queue.Queue()
        self._errors: dict[str, str] = {}
        self._known: set[str] = set()
        """Idempotency keys that have a flow run, which is never started again."""
        self._save_step = _save_step
        if stack := os.environ.get("TESTS_STACK"):
            self._save_step = _in_environment(stack)
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: SaveRequest) -> None:
        if request.key not in self._known:
            self._known.add(request.key)
            self._requests.put(request)

    async def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        failed = {key: Outcome("failed", why) for key, why in self._errors.items()}
        return {each.key: failed.get(each.key, Outcome("pending")) for each in requests}

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            try:
                self._save_step(request)
            except Exception as error:
                self._errors[request.key] = repr(error)
            finally:
                self._requests.task_done()

    def settle(self) -> None:
        """Wait for what follows a commit too: its slots are free then, and old steps pruned."""
        self._requests.join()


class CommitsWhenTold(CommitsHere):
    """Nothing is committed before ``go`` is set, as when Prefect's worker is slow."""

    def __init__(self) -> None:
        self.go = threading.Event()
        super().__init__()

    def submit(self, request: SaveRequest) -> None:
        threading.Thread(target=self._pass_on, args=[request], daemon=True).start()

    def _pass_on(self, request: SaveRequest) -> None:
        self.go.wait()
        super().submit(request)


def _in_environment(binaries: str) -> Callable[[SaveRequest], None]:
    """`_save_step`, done by a process of another environment for as long as this one lives."""
    process = subprocess.Popen(
        [f"{binaries}/python", "-m", __name__],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    asked, told = process.stdin, process.stdout

    def save_step(request: SaveRequest) -> None:
        asked.write(request.model_dump_json() + "\n")
        asked.flush()
        if failure := told.readline().strip():
            raise RuntimeError(failure)

    return save_step


def _save_step(request: SaveRequest) -> None:
    from trinity_sync.orchestration.on_node.prune import prune_after_commit
    from trinity_sync.orchestration.on_node.save import (
        make_save,
        persist_component,
        write_export_requests,
    )

    save = make_save(request)
    (share,) = await_node_shards(save, rank_timeout_s=60)
    spool = JobSpool(Path(share.spool))
    parts = [persist_component(request, component, share) for component in request.components]
    written = [file for part in parts for file in part.written]
    write_export_requests(save, written)
    commit(save, written, await_callable_saves(spool, save))
    free_committed_slots(spool, save, written)
    for wanted in list_export_requests(save.root, step=save.step):
        run_export_request(save.root, wanted)
    if request.keep:
        prune_after_commit(request)


if __name__ == "__main__":
    for line in sys.stdin:
        failure = ""
        try:
            _save_step(SaveRequest.model_validate_json(line))
        except Exception as error:
            failure = repr(error)
        print(failure, flush=True)
