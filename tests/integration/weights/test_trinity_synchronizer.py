"""The Synchronizer that Trinity gets, on real Ray and without Trinity."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.integration.weights.conftest import ASK_S, ask
from tests.integration.weights.test_synchronizer import kill
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.support.weights import first, upload
from trinity_sync.integrations.trinity.synchronizer import NAME, TrinitySynchronizer
from trinity_sync.layout import steps_on_disk
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.steps_in_use import list_steps_in_use


@pytest.fixture
def synchronizer(
    ray_node: None, root: Path, namespace: str, request: pytest.FixtureRequest
) -> Iterator[Any]:
    config = SimpleNamespace(
        checkpoint_job_dir=str(root),
        ray_namespace=namespace,
        model=SimpleNamespace(lora_configs=None),
        trainer=SimpleNamespace(trainer_type="verl", trainer_strategy="fsdp", name="trainer"),
        explorer=SimpleNamespace(
            name="explorer", rollout_model=SimpleNamespace(engine_type="vllm")
        ),
        synchronizer=SimpleNamespace(
            sync_method=SimpleNamespace(value="checkpoint"),
            sync_timeout=getattr(request, "param", 60),
        ),
    )
    actor = TrinitySynchronizer.get_actor(config)
    ask(actor.set_trainer_status.remote("running"))
    yield actor
    ray.kill(actor)


def test_a_returned_commit_is_leased_until_the_explorers_next_call(
    synchronizer: Any, root: Path
) -> None:
    def commit(*steps: int) -> None:
        for step in steps:
            noticed = synchronizer.wait_newer.remote(step - 1, ASK_S)
            commit_files(root, step, kind="state_dict")
            assert ask(noticed).step == step

    def prune_syncs() -> None:
        prune(root, plan_prune(root, Rules(ALL, parse_policy("last=2")), time.time()))

    commit(1)
    assert ask(synchronizer.wait_new_model_state_dict.remote(0)) == 1
    commit(2, 3, 4)
    prune_syncs()
    assert steps_on_disk(root) == [1, 3, 4]
    assert ask(synchronizer.wait_new_model_state_dict.remote(1)) == 4
    commit(5, 6, 7)
    prune_syncs()
    assert steps_on_disk(root) == [4, 6, 7]


def test_each_explorer_has_its_lease_although_trinity_gives_all_of_them_one_name(
    synchronizer: Any, root: Path
) -> None:
    noticed = synchronizer.wait_newer.remote(0, ASK_S)
    commit_files(root, 1, kind="state_dict")
    assert ask(noticed).step == 1
    for _ in range(2):
        assert ask(synchronizer.wait_new_model_state_dict.remote(0)) == 1
    assert list_steps_in_use(root) == {1: ["leased by explorer"] * 2}
    ask(synchronizer.set_trainer_status.remote("stopped"))
    assert ask(synchronizer.wait_new_model_state_dict.remote(1)) == 1
    assert list_steps_in_use(root) == {1: ["leased by explorer"]}, "the other one may load it yet"
    assert ask(synchronizer.wait_new_model_state_dict.remote(1)) == 1
    assert list_steps_in_use(root) == {}


def given(synchronizer: Any) -> float:
    """The value in the weights that an explorer gets."""
    sent = synchronizer.get_model_state_dict_iterator.remote()
    return float(dict(ray.get(each) for each in sent)["0.b"][0])


def test_an_explorer_gets_the_returned_version_while_it_is_available(
    synchronizer: Any, job: Job
) -> None:
    node, state = ray.get_runtime_context().get_node_id(), first()

    def publish(step: int) -> None:
        state["0.b"].fill_(step)
        assert ask(synchronizer.publish.remote(upload(job, step, state, node=node)))

    publish(1)
    assert ask(synchronizer.wait_new_model_state_dict.remote(0)) == 1
    publish(2)
    assert given(synchronizer) == 1
    publish(3)
    assert given(synchronizer) == 3, "the trainer has two slots and has filled both again"


@pytest.mark.parametrize("synchronizer", [0.1], indirect=True)
def test_an_explorer_keeps_its_weights_where_readers_refuse_a_version(
    synchronizer: Any, job: Job
) -> None:
    write_job_settings(job.root, {"on_nonfinite": "refuse"})
    node, state = ray.get_runtime_context().get_node_id(), first()
    for step, value in ((1, math.nan), (2, 2.0)):
        state["0.b"].fill_(value)
        assert ask(synchronizer.publish.remote(upload(job, step, state, node=node)))
        assert ask(synchronizer.wait_new_model_state_dict.remote(step - 1)) == step
        if step == 1:
            assert [*synchronizer.get_model_state_dict_iterator.remote()] == []
    assert given(synchronizer) == 2


def test_an_explorer_never_gets_parts_of_two_versions_if_the_synchronizer_is_killed(
    synchronizer: Any, job: Job, root: Path, namespace: str
) -> None:
    node, state = ray.get_runtime_context().get_node_id(), first()
    assert ask(synchronizer.publish.remote(upload(job, 1, state, node=node)))
    assert ask(synchronizer.wait_new_model_state_dict.remote(0)) == 1
    found = ray.get_actor(NAME, namespace)  # as the processes that serve the model do
    one_at_a_time = {"_generator_backpressure_num_objects": 1}
    sent = found.get_model_state_dict_iterator.options(**one_at_a_time).remote()
    ray.get(next(sent))
    assert ask(synchronizer.publish.remote(upload(job, 2, state, node=node)))
    kill(synchronizer, root)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get([*sent])


def test_a_checkpoint_between_two_uploads_is_what_an_explorer_gets_as_its_version(
    synchronizer: Any, job: Job
) -> None:
    node, state = ray.get_runtime_context().get_node_id(), first()
    state["0.b"].fill_(5)
    assert ask(synchronizer.publish.remote(upload(job, 5, state, node=node)))
    noticed = synchronizer.wait_newer.remote(5, ASK_S)
    state["0.b"].fill_(6)
    job.stage(6, {"model": state})
    job.commit(6)
    assert ask(noticed).step == 6
    assert ask(synchronizer.wait_new_model_state_dict.remote(5)) == 6
    assert given(synchronizer) == 6
