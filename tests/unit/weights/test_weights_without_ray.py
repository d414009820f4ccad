"""Weights reach readers that have no Ray, through the files of the node's spool and of the root."""

import asyncio
import os
import queue
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job import Job
from tests.support.weights import digest, first, train, upload
from tests.support.without_ray import follower
from tests.unit.conftest import Open
from trinity_sync.errors import ConfigError, SaveFailedError, StackError, WeightSyncError
from trinity_sync.settings import Settings
from trinity_sync.snapshot.ticket import write_version_tag
from trinity_sync.storage.runs import open_run
from trinity_sync.weights.committed import CommitNotification
from trinity_sync.weights.folder.reader import FolderReader
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.reader import FileRegistry, WeightReader
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.synchronizer import Synchronizer
from trinity_sync.weights.versions import Version, VersionRegistry

State = dict[str, torch.Tensor]


@pytest.fixture
def job(job: Job) -> Job:
    """A job whose first run has begun, as at a coordinator's first upload or save."""
    open_run(job.root, "first", 0)
    return job


@pytest.fixture
def registry(job: Job, settings: Settings) -> FileRegistry:
    return FileRegistry(job.root, settings=settings)


def weights(step: float) -> State:
    return {"w": torch.full((5000,), float(step))}


def save(job: Job, step: int, *states: Any, run: int = 1) -> None:
    """Stage a state a rank and commit them."""
    for rank, state in enumerate(states):
        job.stage(step, {"model": state}, rank=rank, run=run)
    job.commit(step, run=run)


def found(version: Version | None) -> tuple[int, int, str] | None:
    return (version.run, version.step, version.source) if version else None


def newest(registry: FileRegistry) -> tuple[int, int, str] | None:
    return found(registry.latest())


def test_a_process_without_ray_follows_uploads_commits_and_resumes(
    job: Job, spool_folder: Path
) -> None:
    job.world_size = 2
    states = [first(rank) for rank in range(2)]

    def trained(step: int) -> str:
        for state in states:
            train(state, step)
        every = {name: tensor for state in states for name, tensor in state.items()}
        return digest({name: every[name] for name in every if "tied" not in name})

    environment = {**os.environ, "TRINITY_SYNC_SPOOL": str(spool_folder)}
    with follower(job.root, environment) as explorer:
        for step in (1, 2):
            explorer.wait()
            expected = trained(step)
            upload(job, step, *states)
            assert explorer.loaded() == [str(step), "1", "memory", expected]
        explorer.wait()
        expected = trained(3)
        save(job, 3, *states)
        assert explorer.loaded() == ["3", "1", "checkpoint", expected]
        expected = trained(4)
        upload(job, 4, *states)
        save(job, 4, *states)
        job.close()  # the trainer ends, and takes its images along
        explorer.wait()
        assert explorer.loaded() == ["4", "1", "checkpoint", expected]
        open_run(job.root, "second", 2)
        explorer.wait()
        job.kill()
        upload(job, 9, *states)  # of the first run, which the second has superseded
        expected = trained(3)
        upload(job, 3, *states, run=2)
        assert explorer.loaded() == ["3", "2", "memory", expected]


def test_a_version_counts_once_the_images_of_all_ranks_are_here(
    job: Job, registry: FileRegistry
) -> None:
    job.world_size = 2
    upload(job, 1, weights(1))
    assert newest(registry) is None
    upload(job, 1, weights(1), weights(1))
    assert newest(registry) == (1, 1, "memory")
    upload(job, 2, weights(2))
    assert newest(registry) == (1, 1, "memory")


def test_ranks_that_upload_within_a_tick_of_the_clock_wake_a_wait(
    job: Job, settings: Settings
) -> None:
    """The folder has the same time after the second rank's note as after the first one's."""
    looks: queue.Queue[None] = queue.Queue()

    class Registry(FileRegistry):
        def _read_versions(self, scan: bool = False) -> VersionRegistry:
            versions = super()._read_versions(scan)
            looks.put(None)
            return versions

    job.world_size = 2
    registry = Registry(job.root, settings=settings)
    tick = time.time_ns()

    async def story() -> Version | None:
        upload(job, 1, weights(1))
        os.utime(job.spool.folder, ns=(tick, tick))
        waits = asyncio.create_task(registry.wait_newer(-1, 10))
        for _ in range(2):  # when it is called, and when it begins to wait
            await asyncio.to_thread(looks.get, timeout=250)
        upload(job, 1, weights(1), weights(1))
        os.utime(job.spool.folder, ns=(tick, tick))
        return await waits

    assert found(asyncio.run(story())) == (1, 1, "memory")


def test_a_step_with_images_on_another_node_is_read_from_its_commit(
    job: Job, registry: FileRegistry
) -> None:
    job.world_size = 2
    for rank in (0, 1):
        job.stage(3, {"model": {f"of_rank{rank}": torch.full((9,), 3.0)}}, rank=rank)
    job.commit(3)
    assert job.stager(0).publish(job.origin(3, rank=0), "model")
    assert newest(registry) == (1, 3, "checkpoint")
    with WeightReader(registry, name="explorer") as reader:
        assert dict(reader.iter_weights()).keys() == {"of_rank0", "of_rank1"}


def test_a_reader_that_runs_on_goes_back_with_a_run_that_resumes(
    job: Job, registry: FileRegistry
) -> None:
    save(job, 4, weights(4))
    target = weights(0)
    with WeightReader(registry, name="reader") as reader:
        upload(job, 9, weights(9))
        assert reader.load_into(target) == 9
        assert asyncio.run(reader.wait_newer(timeout_s=0)) is None
        open_run(job.root, "second", 4, 1)
        for step, run in ((4, 1), (5, 2)):
            if run == 2:
                upload(job, 5, weights(5), run=2)
            found = asyncio.run(reader.wait_newer(timeout_s=250))
            assert (found.step, found.run) == (step, run)
            assert reader.load_into(target) == step
            assert target["w"].unique().tolist() == [step]


@pytest.mark.parametrize("form", ["module", "state", "function"])
def test_an_upload_takes_the_model_its_state_or_what_returns_it(
    coordinator_of: Open, registry: FileRegistry, form: str
) -> None:
    module = torch.nn.Linear(3, 2)
    given = {"module": module, "state": module.state_dict(), "function": module.state_dict}[form]
    coordinator_of().upload(4, given)
    loaded = torch.nn.Linear(3, 2)
    assert WeightReader(registry, name="reader").load_into({"model": loaded}) == 4
    assert torch.equal(loaded.weight, module.weight)


def test_a_reader_may_be_given_the_root_first_and_needs_one(job: Job) -> None:
    save(job, 4, weights(4))
    for root in (job.root, str(job.root)):
        with WeightReader(root, name="reader") as reader:
            assert reader.load_into(weights(0)) == 4
    with pytest.raises(ConfigError, match="reader explorer has to know the job; pass root"):
        WeightReader(name="explorer")


def test_a_loop_without_asyncio_takes_each_version(job: Job, registry: FileRegistry) -> None:
    steps = []
    with WeightReader(registry, name="reader") as reader:
        upload(job, 1, weights(1))
        while reader.wait(timeout_s=0):
            steps.append(reader.load_into(weights(0)))
            if steps[-1] < 3:
                upload(job, steps[-1] + 1, weights(steps[-1] + 1))
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("of_folder", [False, True])
def test_a_loop_that_does_not_await_ends_with_the_line_to_write(
    registry: FileRegistry, tmp_path: Path, of_folder: bool
) -> None:
    reader: Any = FolderReader(tmp_path) if of_folder else WeightReader(registry, name="reader")
    with pytest.raises(ConfigError, match=r"write `await reader.wait_newer\(\)`, or"):
        all(iter(reader.wait_newer, None))  # as a loop that goes on until there is none
    assert asyncio.run(reader.wait_newer(timeout_s=0)) is None
    assert asyncio.run(reader.wait_newer(timeout_s=0)) is None


def begin_again(job: Job, settings: Settings) -> Job:
    """The job of a training that begins with the same run key where another one was."""
    shutil.rmtree(job.root)
    again = Job.open(job.root, settings.spool)
    open_run(job.root, "first", 0)
    return again


@pytest.mark.parametrize("source", ["memory", "checkpoint"])
def test_a_reader_that_runs_on_follows_the_training_that_begins_again_whatever_its_step(
    job: Job, registry: FileRegistry, settings: Settings, source: str
) -> None:
    def make(job: Job, step: int) -> None:
        if source == "memory":
            upload(job, step, weights(step))
        else:
            save(job, step, weights(step))

    reader, target = WeightReader(registry, name="explorer"), weights(0)
    make(job, 11)
    assert reader.load_into(target) == 11

    async def story() -> tuple[Job, Version | None]:
        waits = asyncio.create_task(reader.wait_newer(timeout_s=250))
        await asyncio.sleep(0)
        again = await asyncio.to_thread(begin_again, job, settings)
        await asyncio.to_thread(make, again, 1)
        return again, await waits

    again, version = asyncio.run(story())
    assert found(version) == (1, 1, source)
    assert (reader.load_into(target, version), float(target["w"][0])) == (1, 1.0)
    assert asyncio.run(reader.wait_newer(timeout_s=0)) is None
    make(again, 2)
    assert reader.load_into(target) == 2
    again.stager().close()
    reader.close()


def test_a_root_that_is_removed_while_it_is_read_has_no_version_and_no_error(
    job: Job, registry: FileRegistry, settings: Settings
) -> None:
    def begin_again_and_again() -> None:
        for _ in range(200):
            begin_again(job, settings)

    with ThreadPoolExecutor(1) as pool:
        trainings = pool.submit(begin_again_and_again)
        while not trainings.done():
            assert registry.latest() is None
        trainings.result()


def test_a_reader_that_opens_without_a_wait_goes_to_the_training_that_began_again(
    job: Job, registry: FileRegistry, settings: Settings
) -> None:
    reader, target = WeightReader(registry, name="explorer", timeout_s=250), weights(0)
    save(job, 11, weights(11))
    old = registry.latest()
    assert reader.load_into(target) == 11
    again = begin_again(job, settings)
    save(again, 3, weights(3))
    assert (reader.load_into(target, old), float(target["w"][0])) == (3, 3.0)
    again.stager().close()
    reader.close()


def test_a_reader_may_start_before_the_job(tmp_path: Path, settings: Settings) -> None:
    root = tmp_path / "later"
    registry = FileRegistry(root, settings=settings)
    assert registry.latest() is None

    async def story() -> Version | None:
        waits = asyncio.create_task(registry.wait_newer(-1, 60))
        await asyncio.sleep(0)
        open_run(root, "first", 0)
        upload(Job.open(root, settings.spool), 1, weights(1))
        return await waits

    assert found(asyncio.run(story())) == (1, 1, "memory")


@pytest.mark.parametrize("content", ["", "nonsense", "7"])
def test_a_pointer_that_names_no_commit_does_not_hide_one(job: Job, content: str) -> None:
    pointer = job.root / "latest_state_dict_iteration.txt"
    notification = CommitNotification(job.root, "actor")
    save(job, 2, weights(2))
    assert found(notification.find_newest([])) == (1, 2, "checkpoint")
    before = notification.read_signature()
    pointer.write_text(content)
    assert notification.read_signature() != before
    assert found(notification.find_newest([])) == (1, 2, "checkpoint")
    save(job, 3, weights(3))
    assert found(notification.find_newest([])) == (1, 3, "checkpoint")


def test_weights_committed_to_a_step_after_the_pointer_are_noticed(job: Job) -> None:
    """A role of its own commits the step first, and the pointer does not move again."""
    notification = CommitNotification(job.root, "actor")
    job.roles = ("critic",)
    job.stage(2, {"model": weights(2)}, role="critic", kind="state_dict")
    job.commit(2, kind="state_dict")
    assert notification.find_newest([]) is None
    before = notification.read_signature()
    job.roles = ("actor",)
    job.commit_states(2, {"model": weights(2)}, kind="state_dict")
    assert notification.read_signature() != before
    assert found(notification.find_newest([])) == (1, 2, "checkpoint")


def test_a_commit_that_died_before_the_pointer_is_found_by_a_scan(job: Job) -> None:
    notification = CommitNotification(job.root, "actor")
    save(job, 2, weights(2))
    pointer = (job.root / "latest_state_dict_iteration.txt").read_text()
    assert found(notification.find_newest([])) == (1, 2, "checkpoint")
    save(job, 3, weights(3))
    (job.root / "latest_state_dict_iteration.txt").write_text(pointer)
    assert found(notification.find_newest([])) == (1, 2, "checkpoint")
    assert found(notification.find_newest([], scan=True)) == (1, 3, "checkpoint")


def test_calls_that_need_ray_say_so_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    for call in (lambda: Synchronizer.get_actor(root="x"), lambda: Publisher(None, "x", None)):
        with pytest.raises(StackError, match="pip install ray"):
            call()


def test_weights_that_readers_would_not_get_are_not_uploaded(
    coordinator_of: Open, job: Job, settings: Settings
) -> None:
    saves = coordinator_of(run_key="first")
    published, _ = saves.upload(5, lambda: weights(5))
    assert saves.upload(5, lambda: weights(5))[0] == published  # the same again
    with pytest.raises(ConfigError, match=r"step 5, .* with other weights"):
        saves.upload(5, lambda: weights(6))
    with pytest.raises(ConfigError, match=r"step 4, .* is uploaded after step 5"):
        saves.upload(4, lambda: weights(4))
    registry = FileRegistry(job.root, settings=settings)
    with WeightReader(registry, name="reader") as reader:
        assert torch.equal(dict(reader.iter_weights())["w"], weights(5)["w"])
        saves.upload(6, lambda: weights(6))
        assert torch.equal(dict(reader.iter_weights())["w"], weights(6)["w"])
    published, _ = saves.upload(6, lambda: weights(6))
    for slot in job.spool.folder.glob("*.slot*"):
        slot.unlink()
    again, _ = saves.upload(6, lambda: weights(6))
    assert again.image != published.image


@pytest.mark.parametrize("key", ["", "of a run that the root has lost"])
def test_weights_of_a_run_that_is_known_by_its_number_alone_are_read_and_of_a_lost_one_are_not(
    coordinator_of: Open, job: Job, settings: Settings, key: str
) -> None:
    coordinator_of(run_key="first").upload(5, lambda: weights(5))
    for slot, tag in job.spool.list_versions("actor"):
        write_version_tag(slot, replace(tag, run_key=key))
    registry = FileRegistry(job.root, settings=settings)
    with WeightReader(registry, name="reader", timeout_s=0.1) as reader:
        found = asyncio.run(reader.wait_newer(timeout_s=0.1))
    assert bool(found) == (not key)


def test_base_layers_are_not_uploaded_without_their_adapter(coordinator_of: Open) -> None:
    saves = coordinator_of(run_key="first")
    base = {"q.base_layer.weight": torch.ones(3), "q.base_layer.bias": torch.ones(1)}
    for state in (base, {**base, "k.lora_A.weight": torch.ones(2)}):
        with pytest.raises(ConfigError, match=r"q.base_layer.weight is published without the ada"):
            saves.upload(5, lambda: state)  # noqa: B023
    whole = {**base, "q.lora_A.default.weight": torch.ones(2), "norm.weight": torch.ones(3)}
    assert saves.upload(5, lambda: whole)[0]


def test_values_that_the_job_refuses_reach_no_reader(
    coordinator_of: Open, job: Job, settings: Settings
) -> None:
    saves = coordinator_of(run_key="first", job={"on_nonfinite": "refuse"})
    registry, target = FileRegistry(job.root, settings=settings), weights(0)
    bad = weights(6)
    bad["w"][7] = float("nan")
    saves.upload(5, lambda: weights(5))
    with WeightReader(registry, name="reader", timeout_s=0.1) as reader:
        assert reader.load_into(target) == 5
        saves.upload(6, lambda: bad)
        with pytest.raises(WeightSyncError, match=r"version 6 .* non-finite values in w, which"):
            reader.load_into(target)
        with pytest.raises(SaveFailedError, match=r"version 6 .* non-finite values in w, which"):
            saves.wait_all()
        assert torch.equal(target["w"], weights(5)["w"])
        saves.upload(7, lambda: weights(7))
        assert reader.load_into(target) == 7
    saves.wait_all()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_reader_follows_a_root_that_was_restored_although_its_runs_have_the_numbers_again(
    coordinator_of: Open, job: Job, settings: Settings, tmp_path: Path, lost: int
) -> None:
    shutil.copytree(job.root, tmp_path / "backup")
    for number in range(1, 1 + lost):
        coordinator_of(run_key=f"lost {number}").upload(45, partial(weights, 45))
    with WeightReader(FileRegistry(job.root, settings=settings), name="reader") as reader:
        assert reader.load_into(weights(0)) == 45
        assert asyncio.run(reader.wait_newer(timeout_s=0)) is None
        shutil.rmtree(job.root)
        shutil.copytree(tmp_path / "backup", job.root)
        coordinator_of(run_key="next").upload(21, partial(weights, 21))
        newer = asyncio.run(reader.wait_newer(timeout_s=250))
        assert (newer.run, newer.step) == (2, 21)
        assert reader.load_into(target := weights(0)) == 21
        assert torch.equal(target["w"], weights(21)["w"])
        assert asyncio.run(reader.wait_newer(timeout_s=0)) is None


def test_a_registry_drops_the_versions_of_a_run_that_its_root_has_lost(job: Job) -> None:
    async def follow() -> tuple[int, int]:
        registry = AsyncVersionRegistry(str(job.root), "actor")
        await registry.record(Version(45, 1, "memory", str(job.root), run_key="first"))
        before = registry.number
        (job.root / ".trinity_sync/runs/1.json").unlink()
        open_run(job.root, "another", 0)
        await registry.refresh()
        return before, registry.number

    assert asyncio.run(follow()) == (45, 0)
