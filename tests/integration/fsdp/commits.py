"""The bodies of the ``save-step`` flow in a thread of the trainer: everything but Prefect and Ray.

What is written, and how it is committed, is what the flow's tasks call.
"""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from tasks.commit import note_wishes
from tasks.persist import persist_component, save_of
from tasks.prune import prune_after_commit
from trinity_sync.client.save_trigger import Outcome, SaveTrigger
from trinity_sync.export.step import grant
from trinity_sync.request import SaveRequest
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.commit import await_receipts, commit, release_slots
from trinity_sync.storage.placement import await_shares
from trinity_sync.storage.wishes import wishes


class CommitsHere(SaveTrigger):
    """Stands in for Prefect; saves are committed one after the other, as slowly as is asked.

    Settings of the writer come from the environment, as in a Ray worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self._requests: queue.Queue[SaveRequest] = queue.Queue()
        self._failed: dict[str, str] = {}
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: SaveRequest) -> None:
        self._requests.put(request)

    async def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        failed = {key: Outcome("failed", why) for key, why in self._failed.items()}
        return {each.key: failed.get(each.key, Outcome("pending")) for each in requests}

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            try:
                _save_step(request)
            except Exception as error:
                self._failed[request.key] = repr(error)
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


def _save_step(request: SaveRequest) -> None:
    save = save_of(request)
    (share,) = await_shares(save.root, save.run, save.run_key, save.roles, gather_s=60)
    spool = JobSpool(Path(share.spool))
    parts = [persist_component(request, component, share) for component in request.components]
    written = [file for part in parts for file in part.written]
    note_wishes(save, written)
    commit(save, written, await_receipts(spool, save))
    release_slots(spool, save, written)
    for wish in wishes(save.root, step=save.step):
        grant(save.root, wish)
    if request.keep:
        prune_after_commit.fn(request)
