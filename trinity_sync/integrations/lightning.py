"""Callback for Lightning's `Trainer`: saves every few steps, and loads what ``ckpt_path`` names.

Lightning collects a checkpoint and passes it to the `CheckpointIO` of its strategy; ours submits it
instead of writing a file. RNG states, which Lightning does not save, are part of the callback's
state, and are restored before the first batch after a resume.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.layout import step_of_folder

with from_extra("lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import CheckpointIO


_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"


class TrinitySyncCallback(Callback):
    """Saves the checkpoints of a Lightning `Trainer` in one process.

    Args:
        root: the job's root.
        every_n_steps: optimizer steps between two saves; the last step is saved as well.
        keep: number of steps to keep once a newer one is committed; 0 keeps all.
        coordinator: additional arguments of `CheckpointCoordinator`.

    Raises:
        ConfigError: ``every_n_steps`` is less than 1.

    Example::

        saves = TrinitySyncCallback("ckpts", every_n_steps=10)
        trainer = Trainer(callbacks=[saves], enable_checkpointing=False)
        trainer.fit(module, loader, ckpt_path=saves.latest(settle_s=30))
    """

    def __init__(
        self, root: str | Path, *, every_n_steps: int, keep: int = 0, **coordinator: Any
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self._root = Path(root).resolve()
        self._every_n_steps = every_n_steps
        self._arguments = coordinator
        self._keep = keep
        self._coordinator: CheckpointCoordinator | None = None
        self._saved = -1
        self._rng: dict[str, Any] | None = None

    def latest(self, *, settle_s: float = 0.0) -> str | None:
        """Return the folder of the newest committed step, for ``ckpt_path``; None if there is none.

        Args:
            settle_s: seconds to wait for saves that an earlier run submitted on this node.
        """
        newest = self.get_coordinator().latest(settle_s=settle_s)
        return str(newest) if newest else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the `CheckpointIO` of the trainer's strategy.

        Args:
            trainer: Lightning's trainer.
            pl_module: not used.
            stage: not used.

        Raises:
            ConfigError: the trainer has several processes.
        """
        if trainer.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} saves for one process, and this trainer has "
                f"{trainer.world_size}; leave it out, or save with a coordinator of your own"
            )
        if not isinstance(trainer.strategy.checkpoint_io, _SubmittingIO):
            original = trainer.strategy.checkpoint_io
            trainer.strategy.checkpoint_io = _SubmittingIO(self, original, self._root, self._keep)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore the RNG states of the step that was resumed from.

        Args:
            trainer: not used.
            pl_module: not used.
            batch: not used.
            batch_idx: not used.
        """
        if self._rng is not None:
            random.setstate(self._rng["python"])
            np.random.set_state(self._rng["numpy"])
            torch.set_rng_state(self._rng["cpu"])
            if "cuda" in self._rng:
                torch.cuda.set_rng_state(self._rng["cuda"])
            self._rng = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every ``every_n_steps`` steps.

        Args:
            trainer: Lightning's trainer.
            pl_module: not used.
            outputs: not used.
            batch: not used.
            batch_idx: not used.
        """
        if trainer.global_step % self._every_n_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and wait until all saves are committed.

        Args:
            trainer: Lightning's trainer.
            pl_module: not used.

        Raises:
            SaveFailedError: a save failed.
        """
        self._save(trainer)
        coordinator, self._coordinator = self.get_coordinator(), None
        try:
            coordinator.wait_all()
        finally:
            coordinator.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the RNG states of this process."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the RNG states that `state_dict` returned, before the next batch."""
        self._rng = state_dict

    def get_coordinator(self) -> CheckpointCoordinator:
        """Return the job's coordinator, which the first call makes."""
        if self._coordinator is None:
            self._coordinator = CheckpointCoordinator(self._root, **self._arguments)
        return self._coordinator

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if step not in (0, self._saved):  # with accumulated gradients a step has several batches
            trainer.save_checkpoint(self._root / f"global_step_{step}", weights_only=False)
            self._saved = step


class _SubmittingIO(CheckpointIO):
    """Submits checkpoints below the root; others are written by the original `CheckpointIO`."""

    def __init__(
        self, callback: TrinitySyncCallback, original: CheckpointIO, root: Path, keep: int
    ) -> None:
        self._callback, self._original, self._root, self._keep = callback, original, root, keep

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        if (step := self._step_of(path)) is None:
            self._original.save_checkpoint(checkpoint, path, storage_options)
            return
        rest = {k: v for k, v in checkpoint.items() if k not in (_WEIGHTS, _OPTIMIZERS)}
        states = {
            "model": checkpoint[_WEIGHTS],
            "optim": checkpoint[_OPTIMIZERS],
            "extra_state": rest,
        }
        self._callback.get_coordinator().save(step, states, keep=self._keep)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        if (step := self._step_of(path)) is None:
            return self._original.load_checkpoint(path, *arguments, **named)
        states = self._callback.get_coordinator().load(step)
        return {
            **states["extra_state"],
            _WEIGHTS: states["model"],
            _OPTIMIZERS: states["optim"],
        }

    def remove_checkpoint(self, path: Any) -> None:
        self._original.remove_checkpoint(path)

    def _step_of(self, path: Any) -> int | None:
        folder = Path(path)
        return step_of_folder(folder.name) if folder.resolve().parent == self._root else None
