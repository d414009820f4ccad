"""A version in shared memory is published when all ranks have added their images."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.support.job import Job
from tests.support.waiting import until
from tests.support.weights import upload
from trinity_sync import Synchronizer, WeightReader, WeightSyncError
from trinity_sync.snapshot.ticket import VersionTag
from trinity_sync.storage.runs import open_run
from trinity_sync.weights.actor_registry import ActorRegistry
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.state_files import write_address
from trinity_sync.weights.versions import ImageCopy, VersionUnavailableError


@pytest.fixture
def job(root: Path, spool_folder: Path) -> Iterator[Job]:
    with closing(Job.open(root, spool_folder, world_size=2)) as job:
        yield job


def state(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"of_rank{rank}": torch.full((1000,), float(step))}


def stage_image(job: Job, step: int, rank: int = 0) -> VersionTag:
    """Stage a rank's image of a step, as an upload does; return its version tag."""
    stager, origin = job.stager(rank), job.origin(step, rank=rank)
    stager.stage(origin, {"model": state(rank, step)}, seals=False)
    published = stager.publish(origin, "model")
    assert published is not None
    return published


def test_a_version_is_published_once_all_ranks_have_uploaded(job: Job, synchronizer: Any) -> None:
    publishers = [Publisher(synchronizer, job.root, job.spool) for _ in range(2)]
    publishers[0].publish(stage_image(job, 7, rank=0))
    assert ray.get(synchronizer.latest.remote()) is None
    publishers[1].publish(stage_image(job, 7, rank=1))
    for publisher in publishers:
        publisher.wait(30)
    reader = WeightReader(synchronizer, name="explorer-0")
    version = asyncio.run(reader.wait_newer(timeout_s=30))
    assert (version.step, version.run, version.source) == (7, 1, "memory")
    assert [image.rank for image in version.images] == [0, 1]
    with reader.open(version) as view:
        found = dict(view.iter_tensors())
    assert all(torch.equal(found[f"of_rank{n}"], state(n, 7)[f"of_rank{n}"]) for n in (0, 1))
    serving = until(lambda: ray.get(synchronizer.readers.remote()), "word of the reader")
    assert [(each.name, each.step) for each in serving] == [("explorer-0", 7)]


def test_a_reader_has_the_newest_version_that_can_be_read(job: Job, synchronizer: Any) -> None:
    for rank in (0, 1):
        job.stage(1, {"model": state(rank, 1)}, rank=rank)
    job.commit(1)
    assert ray.get(synchronizer.wait_newer.remote(0, 30)).step == 1
    ray.get(synchronizer.set_model_state_dict.remote(None, 2))  # by broadcast
    ray.get(synchronizer.set_model_state_dict.remote({"w": torch.ones(2)}, 3))
    reader = WeightReader(synchronizer, name="evaluator", timeout_s=0.1)
    found = asyncio.run(reader.wait_newer(timeout_s=30))
    assert (found.step, found.source) == (1, "checkpoint")  # type: ignore[union-attr]
    assert len(dict(reader.iter_weights())) == 2
    assert reader.version == found
    assert asyncio.run(reader.wait_newer(timeout_s=0.1)) is None
    for source, why in (("nccl", "is broadcast"), ("memory", "was given as a dict")):
        with pytest.raises(WeightSyncError, match=why):
            reader.load_into({}, ray.get(synchronizer.latest.remote(source)))


def test_a_broadcast_of_the_step_that_a_run_resumed_from_hides_no_commit(
    job: Job, synchronizer: Any
) -> None:
    open_run(job.root, "first", resumed_from=0)
    for rank in (0, 1):
        job.stage(2, {"model": state(rank, 2)}, rank=rank)
    job.commit(2)
    assert ray.get(synchronizer.wait_newer.remote(0, 30)).step == 2
    open_run(job.root, "resumed", resumed_from=2)
    ray.get(synchronizer.set_model_state_dict.remote(None, 2))
    reader = WeightReader(synchronizer, name="evaluator", timeout_s=0.1)
    assert len(dict(reader.iter_weights())) == 2
    assert reader.version is not None
    assert (reader.version.run, reader.version.step) == (1, 2)


def test_a_copy_for_other_nodes_that_has_failed_is_made_again(job: Job, synchronizer: Any) -> None:
    job.world_size = 1
    version = upload(job, 1, state(0, 1), node=ray.get_runtime_context().get_node_id())
    ray.get(synchronizer.publish.remote(version))
    registry, slot = ActorRegistry(synchronizer), Path(version.images[0].slot)
    away = slot.rename(slot.with_name("away"))
    with pytest.raises(VersionUnavailableError, match="was removed with its trainer"):
        registry.fetch_images(version, [0], 60)
    away.rename(slot)

    def fetch() -> Sequence[ImageCopy]:
        with suppress(VersionUnavailableError):
            return registry.fetch_images(version, [0], 60)
        return ()

    [(tag, content)] = until(fetch, "another copy")
    assert (tag.step, len(content)) == (1, version.images[0].nbytes)


def test_a_reader_that_is_given_a_root_asks_the_synchronizer_of_its_cluster(
    job: Job, synchronizer: Any
) -> None:
    job.world_size = 1
    node = ray.get_runtime_context().get_node_id()
    ray.get(synchronizer.publish.remote(upload(job, 1, state(0, 1), node=node)))
    assert WeightReader(root=job.root, name="explorer-0").load_into(state(0, 0)) == 1
    readers = synchronizer.readers
    until(lambda: [each.step for each in ray.get(readers.remote())] == [1], "its reader")


def test_a_reader_in_a_cluster_without_a_synchronizer_reads_by_files(
    job: Job, ray_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(job.spool.folder.parent))
    job.world_size = 1
    open_run(job.root, "first", 0)
    write_address(job.root, "synchronizer-of-another-cluster", "trinity_sync")
    upload(job, 1, state(0, 1))
    assert WeightReader(root=job.root, name="explorer-0").load_into(state(0, 0)) == 1


def test_a_reader_switches_to_the_synchronizer_that_replaces_a_stopped_one(
    job: Job, ray_node: None, namespace: str
) -> None:
    def publish(synchronizer: Any, step: int) -> None:
        version = upload(job, step, state(0, step), node=ray.get_runtime_context().get_node_id())
        assert ray.get(synchronizer.publish.remote(version))

    job.world_size = 1
    stopped = Synchronizer.get_actor(namespace=namespace, root=job.root)
    publish(stopped, 1)
    reader = WeightReader(stopped, name="explorer-0")
    assert reader.load_into(state(0, 0)) == 1
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(stopped.stop.remote())
    with pytest.raises(WeightSyncError, match="the Synchronizer does not answer"):
        asyncio.run(reader.wait_newer(timeout_s=30))
    with pytest.raises(WeightSyncError, match="the Synchronizer does not answer"):
        reader.load_into(state(0, 0))
    synchronizer = Synchronizer.get_actor(namespace=namespace, root=job.root)
    publish(synchronizer, 2)
    assert asyncio.run(reader.wait_newer(timeout_s=30)).step == 2  # type: ignore[union-attr]
    assert reader.load_into(state(0, 0)) == 2
    readers = synchronizer.readers
    until(lambda: [each.step for each in ray.get(readers.remote())] == [2], "its reader")
    ray.kill(synchronizer)


def test_a_trainer_switches_to_the_synchronizer_that_replaces_a_stopped_one(
    job: Job, ray_node: None, namespace: str
) -> None:
    job.world_size = 1
    stopped = Synchronizer.get_actor(namespace=namespace, root=job.root)
    publisher = Publisher(stopped, job.root, job.spool)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(stopped.stop.remote())
    synchronizer = Synchronizer.get_actor(namespace=namespace, root=job.root)
    ray.get(synchronizer.latest.remote())
    publisher.publish(stage_image(job, 1))
    with pytest.raises(WeightSyncError, match=r"version 1 .* is not published"):
        publisher.wait(60)
    until(lambda: publisher._synchronizer == synchronizer, "the other one to be found")
    publisher.publish(stage_image(job, 2))
    publisher.wait(60)
    assert ray.get(synchronizer.latest.remote()).step == 2
    ray.kill(synchronizer)


def test_a_rank_that_does_not_upload_is_named(job: Job, synchronizer: Any) -> None:
    publisher = Publisher(synchronizer, job.root, job.spool, gather_s=0.05)
    publisher.publish(stage_image(job, 7))
    with pytest.raises(WeightSyncError, match=r"version 7 .* ranks \[1\] did not upload step 7"):
        publisher.wait(30)
    publisher.wait(0)  # each failure is raised once


def test_an_explorer_does_not_wait_for_a_version_that_lacks_a_rank(
    job: Job, ray_node: None, namespace: str
) -> None:
    synchronizer = Synchronizer.get_actor(namespace=namespace, root=job.root)
    ray.get(synchronizer.set_trainer_status.remote("running"))
    waits = synchronizer.wait_new_model_state_dict.remote(0)
    until(lambda: ray.get(synchronizer.explorer_requires_sync.remote()), "its wait")
    Publisher(synchronizer, job.root, job.spool, gather_s=0.05).publish(stage_image(job, 7))
    assert ray.get(waits, timeout=250) == 0
    ray.kill(synchronizer)


def test_added_images_outlive_a_killed_synchronizer(job: Job, synchronizer: Any) -> None:
    publisher = Publisher(synchronizer, job.root, job.spool)
    publisher.publish(stage_image(job, 3))
    ray.get(synchronizer.latest.remote())
    ray.kill(synchronizer, no_restart=False)
    publisher.publish(stage_image(job, 3, rank=1))
    publisher.wait(30)
    assert ray.get(synchronizer.latest.remote()).step == 3
