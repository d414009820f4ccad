"""A training rank as a Ray actor, and the group of ranks that the driver calls."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from grpo_copy.task import Batch
from trinity_sync.layout import step_folder
from trinity_sync.weights.weight_group import WeightGroupHost

ROLE = "actor"
EXPLORER = "explorer.rng"
"""Attachment of each checkpoint: the explorer's RNG state after the step's batch."""
TIMEOUT_S = 120.0

Sync = Literal["checkpoint", "memory", "nccl"]
"""Method of the sync: commits, shared memory, or broadcast (over gloo)."""


def make_environment() -> dict[str, str]:
    """Return the environment variables of actors, which also keep their output short."""
    ours = {k: v for k, v in os.environ.items() if k.startswith(("TRINITY_SYNC_", "PREFECT_"))}
    return {
        **ours,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VERL_LOGGING_LEVEL": "ERROR",
    }


@dataclass(frozen=True)
class SaveCost:
    """Bytes staged or sent by one rank, and the seconds that its training stalled."""

    nbytes: int
    stall_s: float


class TrainerRank:
    """One rank: veRL's engine, and trinity_sync as its checkpoint manager.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        rendezvous: path of a file for the ranks' rendezvous, which does not exist yet.
        model: folder of the untrained model.
        root: the job's root.
    """

    def __init__(
        self, rank: int, world_size: int, rendezvous: Path, model: Path, root: Path
    ) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        from grpo_copy.policy import Policy
        from trinity_sync import CheckpointCoordinator
        from trinity_sync.integrations.verl import use_trinity_sync

        self._root = root
        self._policy = Policy(model)
        self._coordinator = CheckpointCoordinator.of_process_group(root)
        self._manager = use_trinity_sync(self._policy.engine, self._coordinator)
        self._group: Any = None

    def get_pid(self) -> int:
        """Return the process id of this rank, once it has started."""
        return os.getpid()

    def train_on(self, batch: Batch) -> float:
        """Take one optimizer step; return this rank's loss."""
        return self._policy.train_on(batch)

    def save_checkpoint(self, step: int, explorer: bytes) -> SaveCost:
        """Submit weights, optimizer and extra state, with the explorer's state.

        Args:
            step: training step.
            explorer: RNG state of the explorer.
        """
        start = time.perf_counter()
        if self._coordinator.rank == 0:  # there is one explorer
            self._coordinator.attach(EXPLORER, explorer, step=step)
        staged = self._manager.save_checkpoint(self._path(step), step)
        return SaveCost(staged.nbytes if staged else 0, time.perf_counter() - start)

    def sync_weights(self, step: int, sync: Sync) -> SaveCost:
        """Sync the weights of a step; only a broadcast waits for the explorer.

        Args:
            step: training step.
            sync: method of the sync.
        """
        start = time.perf_counter()
        if sync == "nccl":
            from trinity_sync import Synchronizer
            from trinity_sync.integrations.verl import fsdp_sync_weight_nccl

            synchronizer = Synchronizer.get_actor(root=self._root) if self._group else None
            fsdp_sync_weight_nccl(
                self._policy.engine, self._group, version=step, synchronizer=synchronizer
            )
            sent = self._policy.engine.module.parameters() if self._group else ()
            nbytes = sum(weight.numel() * weight.element_size() for weight in sent)
        else:
            if sync == "memory":
                staged = self._manager.upload_state_dict(step)
            else:
                staged = self._manager.save_state_dict(self._path(step), step)
            nbytes = staged.nbytes if staged else 0
        return SaveCost(nbytes, time.perf_counter() - start)

    def host_group(self) -> tuple[str, int]:
        """Listen for the explorer; return address and port of this rank."""
        self._host = WeightGroupHost()
        return self._host.address, self._host.port

    def join(self) -> None:
        """Join the group for broadcasts; return when the explorer has joined."""
        self._group = self._host.join(world_size=2, backend="gloo", timeout_s=TIMEOUT_S)

    def load(self, step: int) -> bytes:
        """Resume from a committed checkpoint; return the explorer's state in it."""
        self._manager.load_checkpoint(self._path(step))
        return self._coordinator.attachment(step, EXPLORER, rank=0)

    def fingerprint(self) -> dict[str, str]:
        """Return digests of weights, optimizer state, schedule and RNG states of this rank."""
        return self._policy.fingerprint()

    def close(self) -> None:
        """Wait until the saves of this rank are committed, and free its slots."""
        self._manager.wait_on_save_thread()
        self._coordinator.close()

    def _path(self, step: int) -> str:
        return str(step_folder(self._root, step) / ROLE)


class TrainerGroup:
    """The ranks of a run.

    Args:
        model: folder of the untrained model.
        root: the job's root.
        scratch: existing folder for the ranks' rendezvous.
        world_size: number of ranks.
    """

    def __init__(self, model: Path, root: Path, scratch: Path, *, world_size: int = 2) -> None:
        rendezvous = scratch / f"rendezvous-{time.time_ns()}"
        # num_cpus=0: on a laptop, the CPUs are needed by the tasks that save
        actor = ray.remote(TrainerRank).options(
            num_cpus=0, max_restarts=0, runtime_env={"env_vars": make_environment()}
        )
        self._ranks = [
            actor.remote(rank, world_size, rendezvous, model, root) for rank in range(world_size)
        ]
        self._pids: list[int] = self._call_all("get_pid")

    def train_on(self, batch: Batch) -> list[float]:
        """Take one optimizer step on all ranks; return the loss of each."""
        return self._call_all("train_on", ray.put(batch))

    def save_checkpoint(self, step: int, explorer: bytes) -> list[SaveCost]:
        """Submit a checkpoint on all ranks, with the explorer's state.

        Args:
            step: training step.
            explorer: RNG state of the explorer.
        """
        return self._call_all("save_checkpoint", step, explorer)

    def sync_weights(self, step: int, sync: Sync) -> list[SaveCost]:
        """Sync the weights of all ranks.

        Args:
            step: training step.
            sync: method of the sync.
        """
        return self._call_all("sync_weights", step, sync)

    def form_group(self, explorer: Any) -> None:
        """Form the process group of the first rank and the explorer."""
        first = self._ranks[0]
        address = ray.get(first.host_group.remote())
        ray.get([first.join.remote(), explorer.join.remote(*address)])

    def load(self, step: int) -> bytes:
        """Resume from a committed checkpoint; return the explorer's state in it."""
        return self._call_all("load", step)[0]

    def fingerprints(self) -> list[dict[str, str]]:
        """Return the fingerprint of every rank."""
        return self._call_all("fingerprint")

    def kill(self) -> list[int]:
        """Kill all ranks with SIGKILL; return their process ids."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        return self._pids

    def close(self) -> None:
        """Wait until all saves are committed, and stop the ranks."""
        self._call_all("close")
        for rank in self._ranks:
            ray.kill(rank)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self._ranks])
