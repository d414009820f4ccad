"""Plan a rank's file of a DCP folder with all ranks, and lay it out by the same plan from then on.

The ranks plan together the first time, and when the structure of the state or the length of a
pickled value has changed on any of them.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, ImageError
from trinity_sync.integrations.dcp.distcp_file import DistcpLayouter, LayoutStorage
from trinity_sync.integrations.dcp.structure import describe_structure
from trinity_sync.snapshot.image import LaidOut
from trinity_sync.snapshot.torch_private import disable_plan_cache


class PlannedFile:
    """A rank's file of a folder, laid out again for each save.

    The ranks plan in ``group``; None for one process. The folder is below that of the role; empty
    for the role's.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        make_planner: Callable[[], SavePlanner],
        *,
        folder: str = "",
    ) -> None:
        self._rank = rank
        self._group = group
        self._planner = make_planner
        self._layouter = DistcpLayouter(f"__{rank}_0.distcp", folder)
        self._planned: LayoutStorage | None = None
        self.metadata = Metadata({})
        """Index of the newest save; complete on rank 0 only."""
        self.index = b""
        """Content of the folder's ``.metadata``, on rank 0."""

    def plan(self, state: dict[str, Any], what: str) -> LaidOut:
        """Plan a save with all ranks, and lay out this rank's file; a collective call.

        Raises:
            ImageError: on all ranks: a rank cannot plan its part, or pickle a value.
        """
        self._planned = None  # after an error all ranks plan again
        planned, planner = LayoutStorage(self._layouter), self._make_planner()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(
                    state,
                    storage_writer=planned,
                    planner=planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            raise ImageError(
                f"{what}: nothing was submitted, because rank {rank} cannot plan its part: {first}"
            ) from first
        planned.structure = describe_structure(planner)
        self._planned, self.metadata, self.index = planned, planned.metadata, planned.index
        return planned.take_file()

    def lay_out_again(self, state: dict[str, Any]) -> LaidOut | None:
        """Return this rank's file by the plan of the save before; None if that no longer fits."""
        known = self._planned
        if known is None:
            return None
        try:
            planner = self._make_planner()
            planner.set_up_planner(state, known.storage_meta(), self._rank == 0)
            structure = describe_structure(planner)
            if structure is None or structure != known.structure:
                if planner.create_local_plan() != known.local_plan:
                    return None
                known.structure = structure
            file, results = self._layouter.lay_out(known.plan.items, planner)
        except Exception:  # which planning again raises on all ranks
            return None
        return file if results == known.results else None

    def _make_planner(self) -> SavePlanner:
        """Return a planner without DCP's cache of plans, which all savers of a process share."""
        planner = self._planner()
        disable_plan_cache(planner)
        return planner


def reduce_flags(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank of a group; a collective call.

    All ranks pass equally many flags. Without a group there is one process.
    """
    if group is None:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found]


def make_planning_group(saves: CheckpointCoordinator) -> dist.ProcessGroup | None:
    """Return a process group of all ranks, in which they plan; None for one process.

    A collective call. Others may use the default group at the same time.

    Raises:
        ConfigError: the coordinator is not one of all ranks of the default process group.
    """
    group = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    if (saves.rank, saves.world_size) != (rank, world_size):
        raise ConfigError(
            f"the coordinator of {saves.root} is that of rank {saves.rank} of "
            f"{saves.world_size}, and this is rank {rank} of {world_size} of the process "
            "group; create it by of_process_group"
        )
    return dist.new_group(backend="gloo") if group else None
