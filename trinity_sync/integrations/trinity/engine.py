"""The engine of Trinity's trainer, saving through trinity_sync.

Trinity deletes old checkpoints before the new one is complete, and its monitor counts saves to
decide when to update the latest pointers. Here the workers submit saves, and the commit does both.
"""

import asyncio
from pathlib import Path
from typing import Any

from trinity.algorithm import ALGORITHM_TYPE
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.verl import trainer as theirs

from trinity_sync.adapter import MANIFEST, step_folder
from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations.trinity.job import POSITION, Job, read_position
from trinity_sync.integrations.verl.driver import LOGGED, open_metrics
from trinity_sync.integrations.verl.manager import restore_attachment


class NoMonitor:
    """Replaces Trinity's CheckpointMonitor: the save's flow updates the latest pointers."""

    @classmethod
    def get_actor(cls, *_: Any, **__: Any) -> None:
        """Return None: there is no monitor."""


class Engine(theirs.VERLTrainer):
    """Engine that Trinity's trainer calls to train, save and sync."""

    def __init__(self, global_config: Any) -> None:
        """Restore the data position of the step to load, which the trainer reads next."""
        algorithm = ALGORITHM_TYPE.get(global_config.algorithm.algorithm_type)
        self._job = Job.from_config(global_config, critic=algorithm.use_critic)
        self._initial_step = self._submitted_step = -1
        if global_config.continue_from_checkpoint:
            newest = theirs.find_latest_ckpt_path(self._job.root)
            if newest is not None:
                restore_attachment(Path(newest), POSITION, Path(self._job.position))
        super().__init__(global_config)

    async def save_checkpoint(
        self, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Submit the step; a model ``save_as_hf`` is exported after the commit.

        Raises:
            SaveFailedError: a save failed, if ``block_until_saved``.
        """
        step = self.global_steps
        if step != self._submitted_step and not self._has_committed_start():
            folder = self._make_room()
            self.actor_rollout_wg.save_checkpoint(
                local_path=str(folder / "actor"),
                global_step=step,
                save_as_hf=save_as_hf,
                position=read_position(step),
            )
            if self.use_critic:
                self.critic_wg.save_checkpoint(
                    local_path=str(folder / "critic"),
                    global_step=step,
                    max_ckpt_to_keep=self._job.keep,
                )
            self._submitted_step = step
            LOGGED.note_saved(step, open_metrics(Path(self._job.root)).record)
        if block_until_saved:
            await self.wait_for_save()
            if save_as_hf:  # the step may have been submitted without it before
                await asyncio.to_thread(export_step, self._job.root, step)

    async def save_state_dict(self) -> None:
        """Submit the weights for a sync; those that this run loaded are committed already."""
        if self.global_steps != self._initial_step:
            folder = self._make_room()
            self.actor_rollout_wg.save_state_dict(
                str(folder / "actor"), global_step=self.global_steps
            )
        elif not self._has_committed_start():  # Trinity saved it, without a commit
            await self._record_version()

    def sync_weight_nccl(self) -> None:
        """Broadcast the weights, and record the version after that."""
        super().sync_weight_nccl()
        self._record_version()

    async def wait_for_save(self) -> None:
        """Wait until all saves are committed; raises `SaveFailedError`."""
        self.actor_rollout_wg.wait_on_save_thread()
        if self.use_critic:
            self.critic_wg.wait_on_save_thread()

    def _make_room(self) -> Path:
        """Return the step's folder, without the weights of a sync by Trinity, as that does."""
        folder = step_folder(self._job.root, self.global_steps)
        if not (folder / ".full_checkpoint").exists():  # the commit moves those away
            (folder / "actor" / "model.safetensors").unlink(missing_ok=True)
        return folder

    def _record_version(self) -> Any:
        """Record this step's weights in the Synchronizer; return the object reference."""
        namespace = self.global_config.synchronizer.ray_namespace
        synchronizer = Synchronizer.get_actor(namespace=namespace)
        return synchronizer.set_model_state_dict.remote(None, self.global_steps)

    def _load_checkpoint(self) -> None:
        self.actor_rollout_wg.use_trinity_sync(self._job)
        if self.use_critic:
            self.critic_wg.use_trinity_sync(self._job)
        super()._load_checkpoint()
        self._initial_step = self.global_steps

    def _has_committed_start(self) -> bool:
        """Return whether the model is unchanged since this run loaded it from a commit."""
        step = self.global_steps
        return (
            step == self._initial_step and (step_folder(self._job.root, step) / MANIFEST).exists()
        )
