"""Worker classes of Trinity's trainer, saving through trinity_sync."""

import torch.distributed as dist
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker, TrinityCriticWorker
from verl.single_controller.base.decorator import Dispatch, register

from trinity_sync.integrations.trinity.job import POSITION, Job
from trinity_sync.integrations.verl import (
    FSDPCheckpointManager,
    fsdp_save_state_dict,
    fsdp_upload_state_dict,
    use_trinity_sync,
)


class ActorWorker(TrinityActorRolloutRefWorker):
    """Worker of the actor, one for each rank."""

    _job: Job
    _manager: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_trinity_sync(self, job: Job) -> None:
        """Make the engine save and load through trinity_sync."""
        self._job, self._coordinator = job, job.make_coordinator()
        self._manager = use_trinity_sync(self.actor.engine, self._coordinator)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        global_step: int = 0,
        save_as_hf: bool = False,
        position: bytes | None = None,
    ) -> None:
        """Submit the step, of ``<root>/global_step_<N>/actor``, and the trainer's data position."""
        if position is not None and dist.get_rank() == 0:
            self._coordinator.attach(POSITION, position, step=global_step)
        with self._save_hf_checkpoint_if_requested(save_as_hf):
            self.actor.save_checkpoint(
                local_path, global_step=global_step, max_ckpt_to_keep=self._job.keep
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_state_dict(self, local_path: str, global_step: int = 0) -> None:
        """Submit the weights for a sync through commits."""
        engine = self.actor.engine
        fsdp_save_state_dict(engine, local_path, global_step, self._coordinator, self.logger)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def upload_state_dict(self, global_step: int = 0) -> None:
        """Publish the weights in shared memory."""
        synchronizer = Synchronizer.get_actor(namespace=self._ray_namespace)
        fsdp_upload_state_dict(self.actor.engine, synchronizer, global_step, self.logger)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait until all saves are committed; raises `SaveFailedError`."""
        self._manager.wait_on_save_thread()


class CriticWorker(TrinityCriticWorker):
    """Worker of the critic, one for each rank."""

    _manager: FSDPCheckpointManager

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_trinity_sync(self, job: Job) -> None:
        """Make the engine save and load through trinity_sync."""
        self._manager = use_trinity_sync(self.engine, job.make_coordinator(), role="critic")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on_save_thread(self) -> None:
        """Wait until all saves are committed; raises `SaveFailedError`."""
        self._manager.wait_on_save_thread()
