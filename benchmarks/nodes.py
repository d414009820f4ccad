"""The time until new weights are in readers on two nodes.

::

    python -m benchmarks.nodes [MIB]

A trainer uploads bf16 weights of MIB (512 by default). One reader at a time waits for them, on the
trainer's node or on a second Ray node of this machine, reached over loopback. Printed are median,
lowest and highest of seven versions, after two that do not count: seconds from the call of the
upload to the last byte in the reader's parameters, and seconds of the upload itself.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    import torch

TENSORS = 100
WARM_UP, TURNS = 2, 7
READERS = ("the trainer's node", "another node")


def weights(mib: int) -> "dict[str, torch.Tensor]":
    import torch

    return {f"{n}": torch.ones((mib << 19) // TENSORS).bfloat16() for n in range(TENSORS)}


@ray.remote(num_cpus=0)
class Reader:
    """A reader with parameters of its own."""

    def __init__(self, synchronizer: Any, name: str, mib: int) -> None:
        import torch

        from trinity_sync.weights.reader import WeightReader

        torch.set_num_threads(os.cpu_count() or 1)
        self._reader = WeightReader(synchronizer, name=name)
        self._state = weights(mib)

    def follow(self, step: int) -> float:
        """Load the version after ``step``; return the time of that."""
        version = asyncio.run(self._reader.wait_newer(step))
        assert self._reader.load_into(self._state, version) == step + 1
        done = time.perf_counter()
        assert {float(value[-1]) for value in self._state.values()} == {float(step + 1)}
        return done


class Trainer:
    """One rank in this process."""

    def __init__(self, synchronizer: Any, root: Path, spool: Path, mib: int) -> None:
        from trinity_sync.snapshot.identity import Origin
        from trinity_sync.snapshot.spool import open_job_spool
        from trinity_sync.snapshot.stager import Stager
        from trinity_sync.weights.publisher import Publisher

        job = open_job_spool(spool, root)
        self._origin = lambda step: Origin(
            str(root), 1, "", step, "state_dict", ("actor",), "actor", 0, 1
        )
        self._stager, self._publisher = Stager(job), Publisher(synchronizer, root, job)
        self._state = weights(mib)
        self.step = 0

    def train(self) -> None:
        """Change the weights."""
        self.step += 1
        for value in self._state.values():
            value.fill_(float(self.step))

    def upload(self) -> None:
        """Upload the weights."""
        origin = self._origin(self.step)
        self._stager.stage(origin, {"model": self._state}, seals=False)
        published = self._stager.publish(origin, "model")
        assert published
        self._publisher.publish(published)


def measure(trainer: Trainer, reader: Any) -> tuple[list[float], list[float]]:
    """Return for each version the seconds until it is loaded, and of the upload."""
    loaded, stalls = [], []
    for turn in range(WARM_UP + TURNS):
        answer = reader.follow.remote(trainer.step)
        trainer.train()
        time.sleep(0.3)  # it waits by now
        began = time.perf_counter()
        trainer.upload()
        stall = time.perf_counter() - began
        done = ray.get(answer)
        if turn >= WARM_UP:
            loaded.append(done - began)
            stalls.append(stall)
    return loaded, stalls


def main() -> None:
    from trinity_sync.weights.synchronizer import Synchronizer

    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as root,
        tempfile.TemporaryDirectory(prefix="trinity_sync-bench-", dir="/dev/shm") as spool,
    ):
        cluster = Cluster()
        room = {"num_cpus": 1, "object_store_memory": (3 * mib + 100) << 20}
        nodes = [cluster.add_node(**room, include_dashboard=False).node_id for _ in range(2)]
        ray.init(cluster.address, log_to_driver=False)
        try:
            synchronizer = Synchronizer.get_actor(root=root)
            trainer = Trainer(synchronizer, Path(root), Path(spool), mib)
            for name, node in zip(READERS, nodes, strict=True):
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                reader = Reader.options(  # type: ignore[attr-defined]
                    scheduling_strategy=there
                ).remote(synchronizer, name, mib)
                found = measure(trainer, reader)
                ray.kill(reader)
                shown = [
                    f"{statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})" for x in found
                ]
                print(f"{name:28} loaded {shown[0]} s, stall {shown[1]} s")
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
