"""Find and load the step that a run resumes from, by one rank or by all ranks together."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trinity_sync.client.collective import broadcast_from_rank_0, run_on_all_ranks
from trinity_sync.client.run_context import RunContext
from trinity_sync.fs.changes import ReadOnChange, lengthen_pauses
from trinity_sync.layout import Kind, step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.leases import LONG_LEASE_S, acquire_lease
from trinity_sync.storage.placement import NodeRanks
from trinity_sync.storage.restore import load_states


class StepLoader:
    """Finds and loads the committed steps of a job for one rank.

    Args:
        root: the job's root.
        spool: the job's folder on this node.
        run: this process's run of the job.
        rank: rank of this process.
        world_size: number of ranks that load together.
        places: ranks of each node.
    """

    def __init__(
        self,
        root: Path,
        spool: JobSpool,
        run: RunContext,
        *,
        rank: int,
        world_size: int,
        places: Sequence[NodeRanks],
    ) -> None:
        self._root = root
        self._spool = spool
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._leads_node = rank in {place.ranks[0] for place in places}
        self.is_collective = False
        """Whether all ranks of the default process group call `latest_step` and `load` together."""

    def latest_step(self, kind: Kind, settle_s: float) -> int | None:
        """Return the newest committed step; see `CheckpointCoordinator.latest_step`.

        Args:
            kind: ``checkpoint`` or ``state_dict``.
            settle_s: seconds to wait first for saves in flight.
        """

        def find() -> int | None:
            manifest = find_newest(self._root, kind)
            return manifest.step if manifest else None

        if not self._asks_together:
            self._settle(settle_s)
            return find()
        run_on_all_ranks(self._root, lambda: self._settle(settle_s if self._leads_node else 0.0))
        return broadcast_from_rank_0(self._root, find)

    def load(self, step: int, role: str, *, check: Callable[[], None]) -> dict[str, Any]:
        """Load this rank's states of a step; see `CheckpointCoordinator.load`.

        Args:
            step: training step.
            role: role whose states are loaded.
            check: called first; raises if this run cannot resume from the step.
        """
        with ExitStack() as lease:

            def read() -> dict[str, Any]:
                check()
                holder = f"load by rank {self._rank}"
                lease.enter_context(acquire_lease(self._root, step, holder, ttl_s=LONG_LEASE_S))
                return load_states(
                    self._root,
                    step,
                    role,
                    rank=self._rank,
                    world_size=self._world_size,
                    spool=self._spool,
                )

            folder = step_folder(self._root, step)
            states = run_on_all_ranks(folder, read) if self._asks_together else read()
            self._run.begin_at(step)  # from here on, retention spares the step for this run
        return states

    @property
    def _asks_together(self) -> bool:
        return self.is_collective and dist.is_initialized()

    def _settle(self, seconds: float) -> None:
        """Wait until no image in this node's spool is in flight, at most some seconds."""
        deadline = time.monotonic() + seconds
        tickets, pauses = ReadOnChange(self._spool.folder, self._spool.tickets), lengthen_pauses()
        while time.monotonic() < deadline:
            if all(sealed.failed for sealed in tickets.get()[0]):
                break
            time.sleep(next(pauses))
