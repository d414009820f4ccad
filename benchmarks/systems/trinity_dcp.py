"""DCP's ``async_save`` with trinity_sync as its storage writer, stager and storage reader.

It is otherwise `PrefectRecycled`: the full stack, one slot, files that are written over. DCP gets
the same state as from `DcpThread`, and ``no_dist=True``: the ranks plan in the call, so DCP's
thread exchanges nothing.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.systems.dcp import collect_state, resume_from
from benchmarks.systems.trinity import PrefectRecycled
from trinity_sync.integrations.dcp import DcpSaver, StepReader

if TYPE_CHECKING:
    from benchmarks.training import Training


class DcpOnTrinity(PrefectRecycled):
    """``async_save`` with a `StepWriter`, ``load`` with a `StepReader`."""

    name = "trinity_sync + Prefect, DCP async"
    loads_in_place = True
    restores_from_memory = False

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self._saver = DcpSaver(self._saves)
        self._group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        """Stage, and request the flow run in the background."""
        writer = self._saver.writer(step)
        state = collect_state(self.training)
        async_save(state, storage_writer=writer, async_stager=writer, no_dist=True)

    def load(self, step: int) -> None:
        """Load in place into the live tensors; other values through ``load_state_dict``."""
        state = collect_state(self.training)
        load(state, storage_reader=StepReader(self.folder, step), process_group=self._group)
        resume_from(self.training, state)
