"""Callback for Hugging Face's `Trainer`, and for the trainers of TRL that derive from it.

It replaces the saves of `Trainer`, at the same steps (``save_strategy``, ``save_steps``), keeps
``save_total_limit`` steps, and makes `train` raise if a save failed. `Trainer` resumes by itself:
`TrinitySyncCallback.latest` makes the folder that it expects, with links to the committed files, so
nothing large is written again.
"""

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.layout import PRIVATE_FOLDER, shard_file

with from_extra("hf"):
    from transformers import TrainerCallback
    from transformers.trainer import (
        OPTIMIZER_NAME,
        SCHEDULER_NAME,
        TRAINER_STATE_NAME,
    )
    from transformers.utils import WEIGHTS_NAME


RNG_STATE_NAME = "rng_state.pth"


class TrinitySyncCallback(TrainerCallback):
    """Saves the checkpoints of a `Trainer` in one process.

    Args:
        root: the job's root.
        coordinator: additional arguments of `CheckpointCoordinator`.

    Example::

        saves = TrinitySyncCallback("ckpts")
        trainer = Trainer(model, TrainingArguments(save_steps=10), callbacks=[saves], ...)
        trainer.train(resume_from_checkpoint=saves.latest(settle_s=30))
    """

    def __init__(self, root: str | Path, **coordinator: Any) -> None:
        self._root = Path(root).resolve()
        self._arguments = coordinator
        self._coordinator: CheckpointCoordinator | None = None

    def latest(self, *, settle_s: float = 0.0) -> str | None:
        """Return a folder to resume from the newest committed step; None if there is none.

        Args:
            settle_s: seconds to wait for saves that an earlier run submitted on this node.

        Raises:
            CommitError: the step is corrupted; its digests are compared here.
        """
        coordinator = self._get_coordinator()
        newest = coordinator.latest(settle_s=settle_s)
        if newest is None:
            return None
        step = int(newest.name.removeprefix("global_step_"))
        extra = coordinator.load(step)["extra_state"]
        folder = self._root / PRIVATE_FOLDER / "huggingface" / f"checkpoint-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, component in ((WEIGHTS_NAME, "model"), (OPTIMIZER_NAME, "optim")):
            (folder / name).symlink_to(newest / "actor" / shard_file(component, 1, 0))
        torch.save(extra["lr_scheduler"], folder / SCHEDULER_NAME)
        torch.save(extra["rng"], folder / RNG_STATE_NAME)
        (folder / TRAINER_STATE_NAME).write_text(extra["trainer_state"])
        return str(folder)

    @property
    def root(self) -> Path:
        """The job's root."""
        return self._root

    def upload(self, step: int, model: torch.nn.Module) -> None:
        """Publish a model's weights to readers on this node, without saving them.

        Nothing is copied again if the step is saved as well.

        Args:
            step: the version of the weights, `Trainer`'s ``state.global_step``.
            model: the model.

        Raises:
            SaveFailedError: the weights could not be staged.
        """
        coordinator = self._get_coordinator()
        version, _ = coordinator.upload(step, model.state_dict)
        if version is None:
            coordinator.wait_all()  # which raises why

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Require that `Trainer`'s arguments are supported.

        Args:
            args: `Trainer`'s arguments.
            state: not used.
            control: not used.
            parts: the model, among others.

        Raises:
            ConfigError: an argument is not supported.
        """
        unsupported = {
            "more than one process": args.world_size > 1,
            "save_strategy='best'": args.save_strategy == "best",
            "load_best_model_at_end": args.load_best_model_at_end,
            "save_only_model": args.save_only_model,
            "adapters (PEFT)": hasattr(parts["model"], "peft_config"),
        }
        if asked := [name for name, wanted in unsupported.items() if wanted]:
            raise ConfigError(
                f"{type(self).__name__} does not save with {', '.join(asked)}; leave the callback "
                "out, or save with a CheckpointCoordinator of your own"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save if `Trainer` would save after this step or epoch.

        Args:
            args: `Trainer`'s arguments.
            state: `Trainer`'s state.
            control: `Trainer`'s control flow.
            parts: model, optimizer and schedule, among others.
        """
        self._replace_save(args, state, control, parts)

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wait until all saves are committed.

        Args:
            args: not used.
            state: not used.
            control: not used.
            parts: not used.

        Raises:
            SaveFailedError: a save failed.
        """
        if self._coordinator is not None:
            coordinator, self._coordinator = self._coordinator, None
            try:
                coordinator.wait_all()
            finally:
                coordinator.close()

    def _replace_save(self, args: Any, state: Any, control: Any, parts: Any) -> None:
        if not control.should_save:
            return
        control.should_save = False
        states = {
            "model": parts["model"].state_dict(),
            "optim": parts["optimizer"].state_dict(),
            "extra_state": {
                "lr_scheduler": parts["lr_scheduler"].state_dict(),
                "rng": get_rng_state(),
                "trainer_state": json.dumps(asdict(state)),
            },
        }
        self._get_coordinator().save(state.global_step, states, keep=args.save_total_limit or 0)

    def _get_coordinator(self) -> CheckpointCoordinator:
        if self._coordinator is None:
            self._coordinator = CheckpointCoordinator(self._root, **self._arguments)
        return self._coordinator


def get_rng_state() -> dict[str, Any]:
    """Return the RNG states of this process, by the names that `Trainer` uses."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states
