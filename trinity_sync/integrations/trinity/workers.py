"""The worker classes of Trinity's trainer, with saves of ours; its worker processes import them."""

import torch.distributed as dist
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker, TrinityCriticWorker
from verl.single_controller.base.decorator import Dispatch, register

from trinity_sync.fsdp.engine import (
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    use_trinity_sync,
)
from trinity_sync.fsdp.manager import FSDPCheckpointManager
from trinity_sync.integrations.trinity.job import POSITION, Job


class ActorWorker(TrinityActorRolloutRefWorker):
    """A rank of the actor."""

    _job: Job
    _manager: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_trinity_sync(self, job: Job) -> None:
        """Save and load through trinity_sync from now on."""
        self._job, self._coordinator = job, job.coordinator()
        self._manager = use_trinity_sync(self.actor.engine, self._coordinator)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        global_step: int = 0,
        save_as_hf: bool = False,
        position: bytes | None = None,
    ) -> None:
        """Hand the step over; it is committed with ``position``, and the oldest go after that."""
        if position is not None and dist.get_rank() == 0:
            self._coordinator.attach(POSITION, position, step=global_step)
        with self._save_hf_checkpoint_if_requested(save_as_hf):
            self.actor.save_checkpoint(
                local_path, global_step=global_step, max_ckpt_to_keep=self._job.keep
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_state_dict(self, local_path: str, global_step: int = 0) -> None:
        """Hand the weights over for a sync through the disk."""
        engine = self.actor.engine
        fsdp_save_state_dict(engine, local_path, global_step, self._coordinator, self.logger)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def upload_state_dict(self, global_step: int = 0) -> None:
        """Let explorers have the weights from shared memory."""
        synchronizer = Synchronizer.get_actor(namespace=self._ray_namespace)
        fsdp_upload_state_dict(self.actor.engine, synchronizer, global_step, self.logger)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait for all commits; raises `SaveFailedError`."""
        self._manager.wait_on_save_thread()


class CriticWorker(TrinityCriticWorker):
    """A rank of the critic."""

    _manager: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_trinity_sync(self, job: Job) -> None:
        """Save and load through trinity_sync from now on."""
        self._manager = use_trinity_sync(self.engine, job.coordinator())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait for all commits; raises `SaveFailedError`."""
        self._manager.wait_on_save_thread()
