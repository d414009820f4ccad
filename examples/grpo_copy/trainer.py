"""A training rank as a Ray actor, and the group of ranks that the driver talks to."""

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
from trinity_sync.weights.process_group import WeightGroupHost

ROLE = "actor"
EXPLORER = "explorer.rng"
"""What is attached to each checkpoint: the explorer's state after the step's batch."""
TIMEOUT_S = 120.0

Sync = Literal["checkpoint", "memory", "delta", "nccl"]
"""How weights get to the explorer: by a commit, from shared memory, what changed of them since the
last version there, or by a broadcast (here by gloo)."""


def environment() -> dict[str, str]:
    """What an actor needs of this process's environment, and what keeps its output short."""
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
class Handover:
    """What a save or sync cost a rank: bytes moved and seconds that its training stood still."""

    nbytes: int
    stall_s: float


class TrainerRank:
    """One rank: veRL's engine, and trinity_sync as its checkpoint manager.

    Args:
        rank: of ``world_size`` ranks, which find each other through the file ``rendezvous``.
        world_size: number of ranks.
        rendezvous: path that does not exist yet, the same for all ranks.
        model: folder of the untrained model.
        root: root folder of the job.
    """

    def __init__(
        self, rank: int, world_size: int, rendezvous: Path, model: Path, root: Path
    ) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        from grpo_copy.policy import Policy
        from trinity_sync import CheckpointCoordinator, use_trinity_sync

        self._root = root
        self._policy = Policy(model)
        self._coordinator = CheckpointCoordinator.of_process_group(root)
        self._manager = use_trinity_sync(self._policy.engine, self._coordinator)
        self._group: Any = None

    def process(self) -> int:
        """Process id of this rank; answers once the rank is up."""
        return os.getpid()

    def train_on(self, batch: Batch) -> float:
        """Take one optimizer step; returns this rank's loss."""
        return self._policy.train_on(batch)

    def save_checkpoint(self, step: int, explorer: bytes) -> Handover:
        """Hand weights, optimizer and extra state over to be saved with the explorer's state."""
        start = time.perf_counter()
        if self._coordinator.rank == 0:  # there is one explorer
            self._coordinator.attach(EXPLORER, explorer, step=step)
        staged = self._manager.save_checkpoint(self._path(step), step)
        return Handover(staged.nbytes if staged else 0, time.perf_counter() - start)

    def sync_weights(self, step: int, sync: Sync) -> Handover:
        """Let the explorer have the weights of a step; by a commit and memory, nobody waits."""
        start = time.perf_counter()
        if sync == "nccl":
            from trinity_sync import Synchronizer, fsdp_sync_weight_nccl

            told = Synchronizer.get_actor(root=self._root) if self._group else None
            fsdp_sync_weight_nccl(self._policy.engine, self._group, version=step, synchronizer=told)
            sent = self._policy.engine.module.parameters() if self._group else ()
            nbytes = sum(weight.numel() * weight.element_size() for weight in sent)
        else:
            if sync in ("memory", "delta"):
                staged = self._manager.upload_state_dict(step)
            else:
                staged = self._manager.save_state_dict(self._path(step), step)
            nbytes = staged.nbytes if staged else 0
        return Handover(nbytes, time.perf_counter() - start)

    def host_group(self) -> tuple[str, int]:
        """Listen for the explorer; returns the address and port where it finds this rank."""
        self._host = WeightGroupHost()
        return self._host.address, self._host.port

    def join(self) -> None:
        """Join the explorer in a group for broadcasts; returns when it is there, too."""
        self._group = self._host.join(world_size=2, backend="gloo", timeout_s=TIMEOUT_S)

    def load(self, step: int) -> bytes:
        """Continue from a committed checkpoint; returns the explorer's state in it."""
        self._manager.load_checkpoint(self._path(step))
        return self._coordinator.attachment(step, EXPLORER, rank=0)

    def fingerprint(self) -> dict[str, str]:
        """Digests of weights, optimizer state, schedule and random-number states of this rank."""
        return self._policy.fingerprint()

    def close(self) -> None:
        """Wait for the saves of this rank to be committed and give its slots back."""
        self._manager.wait_on_save_thread()
        self._coordinator.close()

    def _path(self, step: int) -> str:
        return str(step_folder(self._root, step) / ROLE)


class TrainerGroup:
    """The ranks of a run.

    Args:
        model: folder of the untrained model.
        root: root folder of the job.
        scratch: existing folder for the ranks' rendezvous.
        world_size: number of ranks.
    """

    def __init__(self, model: Path, root: Path, scratch: Path, *, world_size: int = 2) -> None:
        rendezvous = scratch / f"rendezvous-{time.time_ns()}"
        # no CPUs are claimed: on a laptop these must be left to the tasks that save
        actor = ray.remote(TrainerRank).options(
            num_cpus=0, max_restarts=0, runtime_env={"env_vars": environment()}
        )
        self._ranks = [
            actor.remote(rank, world_size, rendezvous, model, root) for rank in range(world_size)
        ]
        self._processes: list[int] = self._all("process")

    def train_on(self, batch: Batch) -> list[float]:
        """One optimizer step on all ranks; returns the loss of each."""
        return self._all("train_on", ray.put(batch))

    def save_checkpoint(self, step: int, explorer: bytes) -> list[Handover]:
        """Hand a checkpoint over on all ranks, the explorer's state with it."""
        return self._all("save_checkpoint", step, explorer)

    def sync_weights(self, step: int, sync: Sync) -> list[Handover]:
        """Let the explorer have the weights of all ranks."""
        return self._all("sync_weights", step, sync)

    def meet(self, explorer: Any) -> None:
        """Form the group for broadcasts of the first rank and the explorer."""
        first = self._ranks[0]
        place = ray.get(first.host_group.remote())
        ray.get([first.join.remote(), explorer.join.remote(*place)])

    def load(self, step: int) -> bytes:
        """Continue from a committed checkpoint; returns the explorer's state in it."""
        return self._all("load", step)[0]

    def fingerprints(self) -> list[dict[str, str]]:
        """Digests of the state of every rank."""
        return self._all("fingerprint")

    def kill(self) -> list[int]:
        """SIGKILL all ranks at once, as a machine that loses power would; returns their ids."""
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
        return self._processes

    def close(self) -> None:
        """Wait for all saves and end the ranks."""
        self._all("close")
        for rank in self._ranks:
            ray.kill(rank)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(rank, method).remote(*arguments) for rank in self._ranks])
