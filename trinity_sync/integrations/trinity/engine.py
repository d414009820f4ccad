"""Trinity's engine of its trainer, with saves of ours.

Trinity deletes what is too old before the new checkpoint is whole, and its monitor counts saves to
know when to move the iteration files. Here the workers hand over, and the commit does both.
"""

import asyncio
from pathlib import Path
from typing import Any

from trinity.algorithm import ALGORITHM_TYPE
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.verl import trainer as theirs

from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations.trinity.job import POSITION, Job, read_position
from trinity_sync.integrations.verl.manager import bring_attachment
from trinity_sync.layout import MANIFEST, step_folder


class NoMonitor:
    """In the place of Trinity's CheckpointMonitor: commits are the flow's, and nobody counts."""

    @classmethod
    def get_actor(cls, *_: Any, **__: Any) -> None:
        """There is none."""


class Engine(theirs.VERLTrainer):
    """What Trinity's trainer calls to train, save and sync."""

    def __init__(self, global_config: Any) -> None:
        """Bring the position of the step that will be loaded; the trainer reads it right after."""
        algorithm = ALGORITHM_TYPE.get(global_config.algorithm.algorithm_type)
        self._job = Job.from_config(global_config, critic=algorithm.use_critic)
        self._began_at = self._handed_over = -1
        if global_config.continue_from_checkpoint:
            newest = theirs.find_latest_ckpt_path(self._job.root)
            if newest is not None:
                bring_attachment(Path(newest), POSITION, Path(self._job.position))
        super().__init__(global_config)

    async def save_checkpoint(
        self, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Hand the step over.

        Args:
            block_until_saved: return once all is committed; raises `SaveFailedError`.
            save_as_hf: have the model written in Hugging Face's format, too, after the commit.
        """
        step = self.global_steps
        if step != self._handed_over and not self._has_committed_start():
            folder = step_folder(self._job.root, step)
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
            self._handed_over = step
        if block_until_saved:
            await self.wait_for_save()
            if save_as_hf:  # where the step went without it before; else it is there
                await asyncio.to_thread(export_step, self._job.root, step)

    async def save_state_dict(self) -> None:
        """Hand the weights over for a sync; those that this run began with are there already."""
        if self.global_steps != self._began_at:
            folder = step_folder(self._job.root, self.global_steps)
            self.actor_rollout_wg.save_state_dict(
                str(folder / "actor"), global_step=self.global_steps
            )
        elif not self._has_committed_start():  # Trinity saved it, which the Synchronizer cannot see
            await self._tell()

    def sync_weight_nccl(self) -> None:
        """Broadcast the weights, which are a version once that has succeeded."""
        super().sync_weight_nccl()
        self._tell()

    async def wait_for_save(self) -> None:
        """Wait for all commits; raises `SaveFailedError`."""
        self.actor_rollout_wg.wait_on_save_thread()
        if self.use_critic:
            self.critic_wg.wait_on_save_thread()

    def _tell(self) -> Any:
        """Have the Synchronizer know that this step's weights can be had; a Ray reference."""
        namespace = self.global_config.synchronizer.ray_namespace
        synchronizer = Synchronizer.get_actor(namespace=namespace)
        return synchronizer.set_model_state_dict.remote(None, self.global_steps)

    def _load_checkpoint(self) -> None:
        self.actor_rollout_wg.use_trinity_sync(self._job)
        if self.use_critic:
            self.critic_wg.use_trinity_sync(self._job)
        super()._load_checkpoint()
        self._began_at = self.global_steps

    def _has_committed_start(self) -> bool:
        """Whether the model is what this run loaded, from a commit."""
        step = self.global_steps
        return step == self._began_at and (step_folder(self._job.root, step) / MANIFEST).exists()
