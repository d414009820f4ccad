"""Weights in the memory of one Ray node, for readers and ranks on another.

Both nodes are on this machine. The test itself, its readers and the Synchronizer are on the first.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.conftest import QUIET, environment
from tests.support.job import Job
from tests.support.ray_nodes import ray_cluster
from tests.support.weights import upload
from trinity_sync import Synchronizer, WeightReader, WeightSyncError
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.sync_barrier import SyncSettings
from trinity_sync.weights.versions import Version

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 2,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with environment(QUIET | {"PYTHONPATH": str(Path.cwd())}), ray_cluster() as made:
        made.add_node(**NODE, _system_config=QUICK_TO_NOTICE)
        ray.init(made.address, log_to_driver=False)
        yield made


@pytest.fixture(scope="module")
def other_node(cluster: Cluster) -> str:
    return str(cluster.add_node(**NODE).node_id)


@pytest.fixture
def synchronizer(cluster: Cluster, root: Path) -> Iterator[Any]:
    settings = SyncSettings(timeout_s=30)
    actor = Synchronizer.get_actor(namespace=root.parent.name, root=root, settings=settings)
    yield actor
    ray.kill(actor)


def weights(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"w": torch.randn(300, 500).bfloat16(), "b": torch.randn(7)}


def publish(synchronizer: Any, job: Job, step: int, node: str) -> Version:
    """Have a trainer on that node upload a step."""
    version = upload(job, step, weights(step), node=node)
    ray.get(synchronizer.publish.remote(version))
    return version


def require_has(reader: WeightReader, step: int, source: str = "memory") -> None:
    target = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    assert reader.load_into(target) == step
    assert reader.version.source == source
    expected = weights(step)
    assert all(torch.equal(target[name], expected[name]) for name in expected)


def test_readers_on_another_node_share_one_copy(
    job: Job, synchronizer: Any, other_node: str
) -> None:
    publish(synchronizer, job, 1, other_node)
    require_has(WeightReader(synchronizer, name="explorer-0"), 1)
    for step in (2, 3):  # not published, and they fill the slot of step 1
        upload(job, step, weights(step))
    require_has(WeightReader(synchronizer, name="explorer-1"), 1)
    asked = [ray.get(synchronizer.get_image_refs.remote(1, 1, [0])) for _ in range(2)]
    assert asked[0] == asked[1]


@ray.remote(num_cpus=0)
def upload_there(synchronizer: Any, root: Path, spool: Path, step: int) -> None:
    """What rank 1 of 2 does."""
    job = Job(root, open_job_spool(spool, root), world_size=2)
    stager, origin = job.stager(1), job.origin(step, rank=1)
    stager.stage(origin, {"model": {"b": weights(step)["b"]}}, seals=False)
    published = stager.publish(origin, "model")
    publisher = Publisher(synchronizer, root, job.spool)
    publisher.publish(published)
    publisher.wait(30)


def test_ranks_on_two_nodes_make_one_version(
    job: Job, synchronizer: Any, other_node: str, tmp_path: Path
) -> None:
    there = NodeAffinitySchedulingStrategy(other_node, soft=False)
    spool = tmp_path / "spool of the other node"
    begun = upload_there.options(scheduling_strategy=there).remote(synchronizer, job.root, spool, 4)
    job.world_size = 2
    stager, origin = job.stager(0), job.origin(4)
    stager.stage(origin, {"model": {"w": weights(4)["w"]}}, seals=False)
    published = stager.publish(origin, "model")
    publisher = Publisher(synchronizer, job.root, job.spool)
    publisher.publish(published)
    publisher.wait(60)
    ray.get(begun)
    version = ray.get(synchronizer.latest.remote())
    here = ray.get_runtime_context().get_node_id()
    assert [image.node for image in version.images] == [here, other_node]
    require_has(WeightReader(synchronizer, name="explorer-0"), 4)


def test_the_death_of_the_trainers_node_leaves_the_commit(
    job: Job, synchronizer: Any, cluster: Cluster
) -> None:
    doomed = cluster.add_node(**NODE)
    job.stage(1, {"model": weights(1)})
    publish(synchronizer, job, 1, doomed.node_id)
    cluster.remove_node(doomed, allow_graceful=False)
    patient = WeightReader(synchronizer, name="explorer-0", timeout_s=30)
    job.commit(1)
    require_has(patient, 1, "checkpoint")
    publish(synchronizer, job, 2, doomed.node_id)
    hasty = WeightReader(synchronizer, name="explorer-1", timeout_s=0.2)
    hasty.version = ray.get(synchronizer.latest.remote())
    with pytest.raises(WeightSyncError, match="no copy of version 2 from its node"):
        hasty.load_into({})
