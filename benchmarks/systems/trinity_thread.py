"""Trinity-RFT's way: ``torch.save`` of each component in a thread of rank 0, the others blocking.

As in Trinity's FSDP checkpoint manager, the threads get the live state dict: a trainer that goes on
meanwhile writes a torn file. So its bit-equality is checked without training between save and
durable; its other figures are taken as for the other systems. Trinity does not fsync; here each
thread ends with it.
"""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.systems.torch_save import TorchSave, save_and_sync

if TYPE_CHECKING:
    from benchmarks.training import Training


class TrinityThread(TorchSave):
    """Three threads a save on rank 0; a save waits for those of the one before."""

    name = "Trinity-style thread"
    snapshots = False

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self._threads: list[threading.Thread] = []

    def save(self, step: int) -> None:
        """Start the threads; on other ranks than 0, write in the call."""
        if self.training.rank != 0:
            super().save(step)
            return
        self.wait()
        self.files(step).mkdir(parents=True, exist_ok=True)
        for component, state in self.training.state().items():
            arguments = (state, self.file(step, component))
            self._threads.append(threading.Thread(target=save_and_sync, args=arguments))
            self._threads[-1].start()

    def wait(self) -> None:
        """Join the threads."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
