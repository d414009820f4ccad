"""The controller: issues the dataset's prompts, and puts each rollout into the queue once."""

import time
from itertools import islice
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from tests.environments.whole_run.rollout_queue import RolloutQueue
from tests.environments.whole_run.run import BEHIND_S, ROLES, Run, is_behind
from tests.environments.whole_run.task import Rollout
from trinity_sync import Participant, RolloutLedger

ISSUED, AHEAD = 4, 40
"""Prompts issued to a worker at once; prompts issued and not trained, at most."""
LATE_S = 2.0
"""Seconds after which a prompt is issued again: its worker is dead, or slow."""
POLL_MS = 10


class Controller:
    """Answers rollout workers and the trainer; one thread uses it."""

    def __init__(self, run: Run, part: Participant) -> None:
        self._part, self._queue, self._ledger = part, RolloutQueue(run), RolloutLedger()
        self._size = run.prompts
        self._loader = StatefulDataLoader(list(range(run.prompts)), batch_size=None)
        self._issued_at = dict[int, float]()
        if (step := part.latest_step()) is not None:
            state = part.load(step)
            self._loader.load_state_dict(state["loader"])
            self._ledger.load_state_dict(state["ledger"], step)
            held = self._queue.list_ready()
            self._ledger.resume(held)
            # what was put after the ledger was saved is issued again by the loader
            self._queue.remove(sorted({*held} - {*self._ledger.to_train()}))
        self._prompts = iter(self._loader)

    def serve(self, run: Run) -> None:
        asked_at = 0.0
        with run.serve_controller() as socket:
            while True:
                if socket.poll(POLL_MS):
                    socket.send_pyobj(self._answer(*socket.recv_pyobj()))
                if (step := self._part.wait_cut()) is None:
                    continue
                asked_at = asked_at or time.monotonic()
                if is_behind("controller", step) and time.monotonic() - asked_at < BEHIND_S:
                    continue  # what is put now is in the ledger, and not in the queue's state
                loader, ledger = self._loader.state_dict(), self._ledger.state_dict()
                self._part.save(step, {"loader": loader, "ledger": ledger})
                asked_at = 0.0

    def _answer(self, what: str, content: Any) -> Any:
        match what:
            case "rolled out":
                self._collect(content)
                return self._issue()
            case "trained":
                return self._ledger.train(*content)
            case "is over":
                return self._is_over()
        raise ValueError(what)

    def _collect(self, rollouts: dict[int, Rollout]) -> None:
        for number in self._ledger.finish(list(rollouts)):  # a second rollout is left out
            self._queue.put(number, rollouts[number])

    def _issue(self) -> list[int]:
        now, pending = time.monotonic(), self._ledger.to_issue()
        due = [each for each in pending if now - self._issued_at.get(each, 0.0) > LATE_S]
        room = AHEAD - len(pending) - len(self._ledger.to_train())
        ids = due[:ISSUED] or self._take(min(ISSUED, room))
        self._issued_at |= dict.fromkeys(ids, now)
        return ids

    def _take(self, count: int) -> list[int]:
        """Take prompts from the dataset; from here on the ledger knows them.

        The loader is never asked beyond its last prompt: saved after that, it begins a new epoch.
        """
        left = self._size - sum(self._ledger.count().values())
        ids = list(islice(self._prompts, max(0, min(count, left))))
        self._ledger.issue(ids)
        return ids

    def _is_over(self) -> bool:
        """Whether all prompts that are not trained yet are in the queue."""
        return not self._ledger.to_issue() and not self._take(1)


def control(run: Run) -> None:
    with Participant(run.root, role="controller", roles=ROLES, run_key=run.key) as part:
        Controller(run, part).serve(run)
