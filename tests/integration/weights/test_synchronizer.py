"""The Synchronizer on real Ray."""

import asyncio
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.integration.weights.conftest import ASK_S, ask
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.support.waiting import until
from trinity_sync import ConfigError, Synchronizer, WeightReader, WeightSyncError
from trinity_sync.saves.journal import SaveState, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.runs import open_run
from trinity_sync.weights import actor_registry
from trinity_sync.weights.publisher import Publisher
from trinity_sync.weights.state_files import read_address
from trinity_sync.weights.sync_barrier import SyncSettings
from trinity_sync.weights.trinity_methods import TrinityMethods
from trinity_sync.weights.versions import ImageRef, Version


def version(root: Path, step: int, *, run: int = 1, **other: Any) -> Version:
    return Version(step, run, other.pop("source", "memory"), str(root), **other)


def require(synchronizer: Any, who: str, value: str) -> None:
    """Wait until that explorer has that status."""
    until(
        lambda: ask(synchronizer.explorers.remote()).get(who, "") == value,
        f"{who} to be {value}",
        ASK_S,
    )


def kill(synchronizer: Any, root: Path) -> None:
    """Kill it, and wait until Ray has started it again."""
    before = read_address(root)
    ray.kill(synchronizer, no_restart=False)
    until(lambda: read_address(root) != before, "the restart", ASK_S)


@ray.remote(num_cpus=0)
class Member:
    """A trainer or an explorer that is a Ray actor."""

    def __init__(self, namespace: str = "", root: str = "") -> None:
        self.seen: list[Any] = []

    def ready(self, synchronizer: Any, *args: Any) -> Any:
        return ray.get(synchronizer.ready_to_nccl_sync.remote(*args))

    def get_weight_sync_info(self) -> tuple[str, int, list[Any]]:
        return "127.0.0.1", 4321, [("w", "float32", (2,))]

    def setup_weight_sync_group(self, *args: Any, **named: Any) -> None:
        self.seen.append(("setup", args, named))

    def set_state_dict_meta(self, meta: Any) -> None:
        self.seen.append(("meta", meta))

    def teardown_weight_sync_group(self) -> None:
        self.seen.append("teardown")

    def what_was_seen(self) -> list[Any]:
        return self.seen


def test_concurrent_callers_get_the_same_actor(ray_node: None, root: Path, namespace: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda _: Synchronizer.get_actor(namespace=namespace, root=root), range(8))
        )
    assert len({actor._actor_id for actor in found}) == 1
    assert Synchronizer.get_actor(namespace=namespace)._actor_id == found[0]._actor_id
    assert ask(found[0].latest.remote()) is None
    ray.kill(found[0])


def test_a_trinity_config_names_the_job(ray_node: None, root: Path, namespace: str) -> None:
    class Config:
        checkpoint_job_dir = str(root)
        ray_namespace = namespace

    actor = Synchronizer.get_actor(Config())
    assert actor._actor_id == Synchronizer.get_actor(Config(), root=root)._actor_id
    ray.kill(actor)


def test_a_root_has_no_two_synchronizers_in_different_namespaces(
    synchronizer: Any, root: Path, namespace: str
) -> None:
    assert Synchronizer.get_actor(root=root)._actor_id == synchronizer._actor_id
    with pytest.raises(ConfigError, match=f"is in Ray namespace '{namespace}', not in 'other'"):
        Synchronizer.get_actor(root=root, namespace="other")


def test_a_stopped_synchronizer_is_not_restarted(
    ray_node: None, root: Path, namespace: str
) -> None:
    actor = Synchronizer.get_actor(namespace=namespace, root=root)
    assert ask(actor.latest.remote()) is None
    with pytest.raises(ray.exceptions.RayActorError):
        ask(actor.stop.remote())
    until(lambda: namespace not in str(ray.util.list_named_actors(True)), "its end", ASK_S)
    assert read_address(root) is None


def test_without_a_root_the_namespace_must_have_exactly_one(ray_node: None, namespace: str) -> None:
    with pytest.raises(ConfigError, match="pass root"):
        Synchronizer.get_actor(namespace=namespace)


def test_a_publish_wakes_a_wait(synchronizer: Any, root: Path) -> None:
    waiting = [synchronizer.wait_newer.remote(0, None) for _ in range(20)]
    published = version(root, 5, images=(ImageRef("node", "/slot", "abc", 0, 10),))
    assert ask(synchronizer.publish.remote(published)) is True
    assert ask(waiting) == [published] * 20
    assert ask(synchronizer.latest.remote()) == published


def test_a_commit_wakes_a_wait_of_the_synchronizer(synchronizer: Any, root: Path) -> None:
    waiting = synchronizer.wait_newer.remote(0, None)
    commit_files(root, 4, kind="state_dict")
    assert ask(waiting) == version(root.resolve(), 4, source="checkpoint")


def test_a_wait_that_its_caller_gives_up_does_not_stay_in_the_actor(
    ray_node: None, root: Path, namespace: str
) -> None:
    small = ray.remote(Synchronizer).options(max_concurrency=3)
    actor = small.remote(str(root), "synchronizer-small", namespace, SyncSettings())
    reader = WeightReader(actor, name="reader", root=root)

    async def give_up() -> None:
        for _ in range(4):
            wait = asyncio.create_task(reader.wait_newer())
            await asyncio.sleep(0.5)  # it waits for the answer, too
            wait.cancel()
            await asyncio.wait([wait])

    asyncio.run(give_up())
    assert ask(actor.publish.remote(version(root, 5))) is True
    ray.kill(actor)


def test_a_synchronizer_that_hangs_ends_the_waits_that_have_a_limit(
    synchronizer: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = WeightReader(synchronizer, name="reader", root=job.root)
    publisher = Publisher(synchronizer, job.root, job.spool, gather_s=0.5)
    monkeypatch.setattr(actor_registry, "ANSWER_S", 0.5)
    stager, origin = job.stager(), job.origin(5)
    stager.stage(origin, {"model": {"w": torch.ones(3)}}, seals=False)
    pid = int(read_address(job.root).process.partition("/")[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WeightSyncError, match=r"does not answer \(TimeoutError\)"):
            asyncio.run(reader.wait_newer(timeout_s=0.1))
        publisher.publish(stager.publish(origin, "model"))
        with pytest.raises(WeightSyncError, match=r"version 5 .* is not published after 1 s"):
            publisher.wait()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert asyncio.run(reader.wait_newer(timeout_s=60)).step == 5


def test_weights_of_another_role_are_refused(synchronizer: Any, root: Path) -> None:
    def add_image(rank: int, role: str) -> Any:
        images = (ImageRef("node", f"/{role}", role, rank, 10),)
        shard = version(root, 5, role=role, images=images)
        return synchronizer.add_images.remote(shard, 2, ASK_S)

    first = add_image(0, "actor")
    for refused in (
        add_image(1, "critic"),
        synchronizer.publish.remote(version(root, 5, role="critic")),
    ):
        with pytest.raises(ConfigError, match="step 5 is of role 'critic', and the Synchronizer"):
            ask(refused)
    assert ask(synchronizer.latest.remote()) is None
    ask([first, add_image(1, "actor")])
    found = ask(synchronizer.latest.remote())
    assert [image.slot for image in found.images] == ["/actor", "/actor"]


def test_an_explorer_that_waits_requires_a_sync_until_it_has_a_version(
    synchronizer: Any, root: Path
) -> None:
    assert ask(synchronizer.trainer_requires_weight_sync.remote()) is False, "it has yet to begin"
    ask(synchronizer.set_trainer_status.remote("running"))
    waiting = synchronizer.wait_new_model_state_dict.remote(0)
    require(synchronizer, "explorer", "require_sync")
    assert ask(synchronizer.explorer_requires_sync.remote()) is True
    ask(synchronizer.publish.remote(version(root, 2)))
    assert ask(waiting) == 2
    assert ask(synchronizer.explorer_requires_sync.remote()) is False


def test_an_explorer_that_ends_leaves_the_request_of_another_one_of_its_name(
    synchronizer: Any,
) -> None:
    ask(synchronizer.set_trainer_status.remote("running"))
    wait = synchronizer.wait_new_model_state_dict.remote(0)
    require(synchronizer, "explorer", "require_sync")
    ask(synchronizer.set_explorer_status.remote("stopped"))
    assert ask(synchronizer.explorer_requires_sync.remote())
    ask(synchronizer.notify_no_new_model_state_dict.remote())
    assert ask(wait) == 0
    assert not ask(synchronizer.explorer_requires_sync.remote())


async def others_go_first() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_a_sync_whose_commit_fails_ends_one_wait_of_each_explorer(
    ray_node: None, root: Path, namespace: str
) -> None:
    async def story() -> list[int]:
        open_run(root, "first", 0)
        methods = TrinityMethods(str(root), namespace, SyncSettings())
        await methods.set_trainer_status("running")
        waits = asyncio.create_task(methods.wait_new_model_state_dict(0, explorer="a"))
        await others_go_first()
        append(SaveRequest(root=str(root), step=4, run=1, kind="state_dict"), "failed", "full")
        found = [await asyncio.wait_for(waits, ASK_S)]
        late = methods.wait_new_model_state_dict(0, explorer="b")
        found.append(await asyncio.wait_for(late, ASK_S))
        waits = asyncio.create_task(methods.wait_new_model_state_dict(0, explorer="a"))
        await others_go_first()
        await methods._registry.record(version(root, 8))
        return [*found, await asyncio.wait_for(waits, ASK_S)]

    assert asyncio.run(story()) == [0, 0, 8]


@pytest.mark.parametrize("fact", ["checkpoint beside uploads", "earlier run", "in flight"])
def test_an_explorer_waits_on_where_no_sync_has_failed(
    ray_node: None, root: Path, namespace: str, fact: str
) -> None:
    async def story() -> int:
        open_run(root, "first", 0)
        if fact == "earlier run":
            open_run(root, "second", 4)
        methods = TrinityMethods(str(root), namespace, SyncSettings())
        await methods.set_trainer_status("running")
        if fact == "checkpoint beside uploads":
            await methods._registry.record(version(root, 4))
        state: SaveState = "begun" if fact == "in flight" else "failed"
        append(SaveRequest(root=str(root), step=6, run=1), state)
        waits = asyncio.create_task(methods.wait_new_model_state_dict(4))
        await others_go_first()
        if fact == "in flight":
            await methods.notify_no_new_model_state_dict()
        for _ in range(5):  # what a wait that ends would do first
            await methods._registry.find_last_save()
            await others_go_first()
        await methods._registry.record(version(root, 8, run=methods._registry.versions.run))
        return await asyncio.wait_for(waits, ASK_S)

    assert asyncio.run(story()) == 8


def test_a_wait_that_is_cancelled_at_once_leaves_no_request_for_a_sync(
    ray_node: None, root: Path, namespace: str
) -> None:
    async def story() -> bool:
        methods = TrinityMethods(str(root), namespace, SyncSettings())
        await methods.set_trainer_status("running")
        wait = asyncio.create_task(methods.wait_new_model_state_dict(0))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        return await methods.explorer_requires_sync()

    assert asyncio.run(story()) is False


def test_a_synchronizer_killed_during_a_run_restarts_with_the_right_version(
    synchronizer: Any, root: Path
) -> None:
    commit_files(root, 3, kind="state_dict")
    ask(synchronizer.set_trainer_status.remote("running"))
    ask(synchronizer.publish.remote(version(root, 7)))
    ask(synchronizer.set_serving.remote("rollout-0", 7, 1))
    waiting = synchronizer.wait_newer.remote(7, None)
    commit_files(root, 8, kind="state_dict")
    kill(synchronizer, root)
    assert ask(waiting) == version(root.resolve(), 8, source="checkpoint")
    assert ask(synchronizer.latest.remote("memory")) == version(root, 7)
    (reader,) = ask(synchronizer.readers.remote())
    assert (reader.name, reader.step, reader.behind) == ("rollout-0", 7, 1)
    assert ask(synchronizer.trainer_requires_weight_sync.remote()) is False


def test_a_recreated_root_has_none_of_the_old_versions(
    synchronizer: Any, root: Path, namespace: str
) -> None:
    ask(synchronizer.publish.remote(version(root, 11)))
    shutil.rmtree(root)
    root.mkdir()
    Synchronizer.get_actor(namespace=namespace, root=root)
    until(lambda: read_address(root), "the address", ASK_S)
    assert ask(synchronizer.latest.remote()) is None
    assert ask(synchronizer.publish.remote(version(root, 1))) is True


def test_a_failed_nccl_rendezvous_does_not_advance_the_version(synchronizer: Any) -> None:
    ask(synchronizer.set_explorer_status.remote("running"))
    assert ask(synchronizer.ready_to_nccl_sync.remote("trainer", 6, None, 0.05)) is None
    assert ask(synchronizer.get_latest_model_version.remote()) == 0
    assert ask(synchronizer.trainer_requires_weight_sync.remote()) is False


def test_a_dead_explorer_ends_the_rendezvous_and_counts_as_stopped(
    synchronizer: Any, namespace: str
) -> None:
    explorers = {
        name: Member.options(name=name, namespace=namespace).remote() for name in ("a", "b")
    }
    for name, actor in explorers.items():
        ask(actor.what_was_seen.remote())
        ask(synchronizer.set_explorer_status.remote("running", explorer=name))
    ask(synchronizer.set_trainer_status.remote("running"))
    first = explorers["a"].ready.remote(synchronizer, "explorer", 0, "a")
    require(synchronizer, "a", "require_sync")
    trainer = synchronizer.ready_to_nccl_sync.remote("trainer", 6)
    until(lambda: ask(synchronizer.trainer_requires_weight_sync.remote()), "the trainer", ASK_S)
    ray.kill(explorers["b"])
    assert ask([trainer, first]) == [None, None]
    assert ask(synchronizer.explorers.remote()) == {"a": "running", "b": "stopped"}
    again = synchronizer.ready_to_nccl_sync.remote("trainer", 7)
    assert ask(explorers["a"].ready.remote(synchronizer, "explorer", 0, "a")) == 7
    assert ask(again) == 7
    ray.kill(explorers["a"])


@pytest.mark.parametrize("together", [False, True])
def test_a_dead_trainer_releases_the_explorers_that_wait_also_if_the_synchronizer_died_with_it(
    synchronizer: Any, namespace: str, together: bool
) -> None:
    trainer = Member.options(name="trainer", namespace=namespace).remote()
    ask(trainer.what_was_seen.remote())
    ask(synchronizer.set_trainer_status.remote("running"))
    ready = synchronizer.ready_to_nccl_sync.remote("explorer", 0, "a")
    waiting = synchronizer.wait_new_model_state_dict.remote(3, explorer="b")
    require(synchronizer, "a", "require_sync")
    require(synchronizer, "b", "require_sync")
    if together:  # as with their node; Ray starts it again
        ray.kill(synchronizer, no_restart=False)
    ray.kill(trainer)
    assert ask([ready, waiting]) == [None, 0]
    assert ask(synchronizer.trainer_requires_weight_sync.remote()) is None
    assert ask(synchronizer.explorers.remote()) == {"a": "running", "b": "running"}


def test_the_group_of_a_broadcast_is_formed_and_left(synchronizer: Any, namespace: str) -> None:
    members = {
        name: Member.options(name=name, namespace=namespace).remote()
        for name in ("trainer", "a", "b")
    }
    for name in ("a", "b"):
        ask(synchronizer.set_explorer_status.remote("running", explorer=name))
    ask(synchronizer.coordinate_weight_sync_setup.remote(20))
    ask(synchronizer.coordinate_weight_sync_teardown.remote())
    seen = {name: ask(actor.what_was_seen.remote()) for name, actor in members.items()}
    joined = ("127.0.0.1", 4321, 3, "rollout_weight_sync", 20)
    meta = [("w", "float32", (2,))]
    assert seen["trainer"] == [("setup", joined, {}), "teardown"]
    assert seen["a"] == [("setup", joined, {"rank_offset": 1}), ("meta", meta), "teardown"]
    assert seen["b"] == [("setup", joined, {"rank_offset": 2}), ("meta", meta), "teardown"]
    for actor in members.values():
        ray.kill(actor)


def test_a_group_without_an_explorer_is_refused_with_a_remedy(
    synchronizer: Any, namespace: str
) -> None:
    trainer = Member.options(name="trainer", namespace=namespace).remote()
    ask(trainer.what_was_seen.remote())
    with pytest.raises(WeightSyncError, match="explorer are no Ray actors"):
        ask(synchronizer.coordinate_weight_sync_setup.remote(5))
    ray.kill(trainer)


def test_the_newest_state_dict_goes_through_the_object_store_also_as_references(
    synchronizer: Any, root: Path
) -> None:
    state = {"w": torch.arange(6).reshape(2, 3).bfloat16(), "b": torch.ones(2)}
    ask(synchronizer.set_model_state_dict.remote(state, 3))
    ask(synchronizer.publish.remote(version(root, 4)))
    found, number = ask(synchronizer.get_model_state_dict.remote())
    assert number == 3  # of these tensors, though there is a newer version
    assert all(torch.equal(found[name], state[name]) for name in state)
    streamed = dict(ray.get(each) for each in synchronizer.get_model_state_dict_iterator.remote())
    assert all(torch.equal(streamed[name], state[name]) for name in state)
    assert ask(synchronizer.get_state_dict_meta.remote()) == [
        ("w", "bfloat16", (2, 3)),
        ("b", "float32", (2,)),
    ]

    ask(synchronizer.set_model_state_dict.remote({"w": ray.put(torch.ones(3))}, 5))
    found, _ = ask(synchronizer.get_model_state_dict.remote())
    assert torch.equal(found["w"], torch.ones(3))  # by references
    ask(synchronizer.set_model_state_dict.remote("s3://new", 7))
    ask(synchronizer.set_model_state_dict.remote("s3://old", 6))  # late
    assert ask(synchronizer.get_model_state_dict.remote()) == ("s3://new", 7)
