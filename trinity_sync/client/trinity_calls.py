"""Trinity-RFT's calls: saves by the user's own functions, and the flow run that waits for them.

Names and meanings are those of its CheckpointCoordinator, with Prefect in the place of its
CheckpointMonitor.
"""

import os
import uuid
from collections.abc import Callable
from typing import Any

from trinity_sync.client.job_process import JobProcess
from trinity_sync.fs.process import process_name
from trinity_sync.layout import Kind, check_name, check_number
from trinity_sync.snapshot.callable_status import Receipt
from trinity_sync.snapshot.ticket import components_of
from trinity_sync.storage.placement import placement


class TrinityCalls(JobProcess):
    """See the module."""

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], Any],
        global_step: int,
        is_state_dict: bool = False,
    ) -> None:
        """Run ``save_fn`` in a background thread; the step's flow waits for it to end.

        It follows Trinity's method. Saves of the same name run one after the other. The files
        below the step's folder that change while it runs enter the manifest. Call it before `save`
        of the same step, or `register_and_monitor` after it: those ask for the flow run.

        Args:
            name: name of the save, unique within a step and rank.
            save_fn: called without arguments. A failure of it fails the step's flow, is raised by
                `wait_all`, and leaves later saves alone.
            global_step: training step.
            is_state_dict: whether it belongs to the sync of the step or to its checkpoint.
        """
        self._functions.start(name, save_fn, self._call_of(name, global_step, is_state_dict))

    def save_sync(
        self, save_fn: Callable[[], Any], global_step: int, is_state_dict: bool = False
    ) -> None:
        """Run ``save_fn`` here and now, e.g. because it calls collectives; as `save_async` else."""
        name = f"sync-{uuid.uuid4().hex[:8]}"
        self._functions.call(save_fn, self._call_of(name, global_step, is_state_dict))

    async def register_and_monitor(
        self,
        global_step: int,
        is_state_dict: bool = False,
        state_dict_thread_count: int = 0,
        checkpoint_thread_count: int = 0,
    ) -> None:
        """Ask for the flow run of a step whose saves were dispatched; it does not wait for them.

        It follows Trinity's method. A step whose ranks have asked already gets no second run.

        Args:
            global_step: training step.
            is_state_dict: whether the sync or the checkpoint of the step is meant.
            state_dict_thread_count: saves of model weights to expect at least.
            checkpoint_thread_count: other saves to expect at least.

        Raises:
            ConfigError: the step or a count is no whole number, or negative.
        """
        global_step = check_number("step", global_step)
        expected = check_number("state_dict_thread_count", state_dict_thread_count)
        expected += check_number("checkpoint_thread_count", checkpoint_thread_count)
        kind: Kind = "state_dict" if is_state_dict else "checkpoint"
        self.wait_staged()
        self._monitored = {each for each in self._monitored if each[0] == global_step}
        self._monitored.add((global_step, kind))
        run = self._run.begun()
        tickets = [sealed.ticket for sealed in self.spool.of_step(run.number, global_step)[0]]
        mine = [ticket for ticket in tickets if ticket.kind == kind]
        roles = mine[0].roles if mine else self.roles
        for role in roles:
            if placement(self.root, run.number, run.key, role) is None:  # nothing but functions
                self._place(role)
        keep = max((ticket.keep for ticket in mine), default=0)
        request = self._request(run, global_step, kind, roles, components_of(mine), keep, expected)
        self._hand_over(request, always=True)

    def _call_of(self, name: str, step: int, is_state_dict: bool) -> Receipt:
        self._require_own_process()
        return Receipt(
            name=check_name("name of a save", name),
            run=self._run.begun().number,
            step=check_number("step", step),
            kind="state_dict" if is_state_dict else "checkpoint",
            rank=self.rank,
            process=process_name(os.getpid()),
        )
