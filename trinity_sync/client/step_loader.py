"""Find and load the step that a run resumes from, by one rank or by all ranks together."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trinity_sync.client.collective import (
    broadcast_from_rank_0,
    lease_on_rank_0,
    run_on_all_ranks,
)
from trinity_sync.client.run_context import RunContext
from trinity_sync.fs.changes import ReadOnChange, lengthen_pauses
from trinity_sync.layout import Kind, step_folder
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.latest_pointer import warn_of_other_step
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.placement import NodeRanks
from trinity_sync.storage.restore import load_states


class StepLoader:
    """Finds and loads the committed steps of a job for one rank.

    ``begin_commits`` starts what commits the saves that an earlier run has left on this node.
    """

    def __init__(
        self,
        root: Path,
        spool: JobSpool,
        run: RunContext,
        begin_commits: Callable[[], None],
        *,
        rank: int,
        world_size: int,
        places: Sequence[NodeRanks],
    ) -> None:
        self._root = root
        self._spool = spool
        self._run = run
        self._begin_commits = begin_commits
        self._rank = rank
        self._world_size = world_size
        self._leads_node = rank in {place.ranks[0] for place in places}
        self.is_collective = False
        """Whether all ranks of the default process group find and load steps together."""

    def latest_step(self, kind: Kind, settle_s: float) -> int | None:
        """As `CheckpointCoordinator.latest_step`."""

        def find() -> int | None:
            manifest = find_newest(self._root, kind)
            if manifest and kind == "checkpoint":
                warn_of_other_step(self._root, manifest.step)
            return manifest.step if manifest else None

        if not self._asks_together:
            self._settle(settle_s)
            return find()
        run_on_all_ranks(self._root, lambda: self._settle(settle_s if self._leads_node else 0.0))
        return broadcast_from_rank_0(self._root, find)

    def load(self, step: int, role: str) -> dict[str, Any]:
        """As `CheckpointCoordinator.load`."""

        def read(manifest: Manifest) -> dict[str, Any]:
            return load_states(
                self._root,
                step,
                role,
                rank=self._rank,
                world_size=self._world_size,
                spool=self._spool,
                manifest=manifest,
            )

        if self._asks_together:
            lease, folder = lease_on_rank_0(self._root, step), step_folder(self._root, step)
        else:
            lease, folder = lease_to_read(self._root, step, f"load by rank {self._rank}"), None
        with lease as manifest:
            states = run_on_all_ranks(folder, lambda: read(manifest)) if folder else read(manifest)
            self.begin_at(step)  # from here on, retention spares the step for this run
        return states

    def require_can_begin_at(self, step: int, wait_staged: Callable[[], object]) -> None:
        """As `CheckpointCoordinator.check_resume`, after a call of ``wait_staged``.

        The ranks have one key, so rank 0 looks at the runs in the root for all.
        """

        def check() -> None:
            wait_staged()
            if self._rank and self._asks_together:
                self._run.has_begun_at(step)
            else:
                self._run.require_can_begin_at(step)

        if self._asks_together:
            run_on_all_ranks(step_folder(self._root, step), check)
        else:
            check()

    def begin_at(self, step: int) -> None:
        """Begin the run at a step; rank 0 begins it for all."""
        if self._asks_together:
            folder = step_folder(self._root, step)
            self._run.join(broadcast_from_rank_0(folder, lambda: self._run.begin_at(step)))
        else:
            self._run.begin_at(step)

    @property
    def _asks_together(self) -> bool:
        return self.is_collective and dist.is_initialized()

    def _settle(self, seconds: float) -> None:
        """Wait until no image in this node's spool is in flight, at most some seconds."""
        deadline = time.monotonic() + seconds
        tickets, pauses = ReadOnChange(self._spool.folder, self._spool.tickets), lengthen_pauses()
        begun = False
        while time.monotonic() < deadline:
            if all(sealed.failed for sealed in tickets.get()[0]):
                break
            if not begun:
                self._begin_commits()
            begun = True
            time.sleep(next(pauses))
