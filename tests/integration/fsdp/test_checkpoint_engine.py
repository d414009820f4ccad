"""The back end of veRL's weight transfer, its two ends in this process and without Ray."""

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWithCache

from tests.conftest import environment
from tests.integration.fsdp.commits import CommitsHere
from tests.support.states import differences
from trinity_sync import CheckpointCoordinator, ConfigError, WeightSyncError
from trinity_sync.integrations.verl.checkpoint_engine import TrinitySyncCheckpointEngine, _Sender
from trinity_sync.snapshot import stager
from trinity_sync.storage.restore import load_states

Engine = TrinitySyncCheckpointEngine
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def spool(spool_folder: Path) -> Iterator[None]:
    with environment({"TRINITY_SYNC_SPOOL": str(spool_folder)}):
        yield


@pytest.fixture
def trainer(root: Path) -> Engine:
    return Engine(is_master=True, root=root)


@pytest.fixture
def rollout(root: Path) -> Engine:
    return Engine(root=root, timeout_s=30)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Some weights that differ at each step in every tensor."""
    random = torch.Generator().manual_seed(step)
    return {
        "embed.weight": torch.randn(64, 32, generator=random).bfloat16(),
        "norm.weight": torch.randn(32, generator=random).bfloat16(),
        "gate.weight": torch.randn(8, 32, generator=random),
        "scale": torch.tensor(float(step)),
        "nothing": torch.empty(0, 4),
    }


def send(trainer: Engine, step: int | None, weights: Weights | None = None) -> None:
    named = weights_of(step or 0) if weights is None else weights
    asyncio.run(trainer.send_weights(iter(named.items()), step))


async def copied(weights: Any) -> Weights:
    return {name: tensor.clone() async for name, tensor in weights}


def receive(rollout: Engine, step: int | None) -> Weights:
    return asyncio.run(copied(rollout.receive_weights(step)))


def receive_later(rollout: Engine, trainer: Engine, step: int) -> Weights:
    """Receive a step that is sent once its receiver waits for it."""

    async def update() -> Weights:
        receiving = asyncio.create_task(copied(rollout.receive_weights(step)))
        await asyncio.wait([receiving], timeout=0.1)
        assert not receiving.done()
        await trainer.send_weights(iter(weights_of(step).items()), step)
        return await receiving

    return asyncio.run(update())


def cached(rollout: Engine, step: int | None = None) -> Weights:
    return asyncio.run(copied(rollout.get_weights(step)))


def connect(trainer: Engine, *rollouts: Engine) -> None:
    """What veRL's manager does before each update."""
    metadata = [each.prepare() for each in (trainer, *rollouts)]
    ours, theirs = Engine.build_topology(1, len(rollouts), metadata)
    for n, each in enumerate((trainer, *rollouts)):
        kwargs = theirs if n else ours
        each.init_process_group(
            **{key: values[n - 1 if n else 0] for key, values in kwargs.items()}
        )


def same(left: Weights, right: Weights) -> bool:
    return not differences(left, right)


def test_verl_makes_the_engine_by_its_name(root: Path) -> None:
    engine = CheckpointEngineRegistry.new(
        "trinity_sync", is_master=True, bucket_size=2 << 30, root=str(root)
    )
    assert isinstance(engine, CheckpointEngineWithCache)


def test_a_receiver_waits_for_the_step_that_it_was_told(trainer: Engine, rollout: Engine) -> None:
    send(trainer, 1)
    connect(trainer, rollout)
    assert same(receive_later(rollout, trainer, 2), weights_of(2))


def test_a_tensor_is_valid_until_the_next_is_taken(trainer: Engine, rollout: Engine) -> None:
    buffer = torch.empty(100)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(3):
            yield f"layer.{n}", buffer.fill_(n)

    asyncio.run(trainer.send_weights(weights(), 1))
    assert [each.unique().tolist() for each in receive(rollout, 1).values()] == [[0], [1], [2]]


def test_other_ranks_only_walk_the_generator(root: Path, rollout: Engine) -> None:
    other = Engine(root=root)
    weights = iter(weights_of(1).items())
    asyncio.run(other.send_weights(weights, 1))
    assert next(weights, None) is None
    with pytest.raises(WeightSyncError, match="nothing is published"):
        cached(rollout)


def test_a_step_that_is_gone_is_refused_instead_of_another(
    trainer: Engine, rollout: Engine
) -> None:
    connect(trainer, rollout)
    for step in (1, 2):
        send(trainer, step)
    with pytest.raises(WeightSyncError, match=r"step 1 .* is gone.* newest version is step 2"):
        receive(rollout, 1)
    with pytest.raises(WeightSyncError, match="newest version is step 2"):
        cached(rollout, 1)
    assert same(cached(rollout, 2), weights_of(2))


def test_a_reader_that_stops_early_holds_nothing(trainer: Engine, rollout: Engine) -> None:
    async def take_one() -> None:
        async with aclosing(rollout.get_weights()) as weights:
            async for _ in weights:
                break

    for step in range(1, 9):
        send(trainer, step)
        asyncio.run(take_one())
    slots = list(Path(os.environ["TRINITY_SYNC_SPOOL"]).glob("*/rollout.model.*.slot"))
    assert len(slots) == 2


def test_a_version_that_cannot_be_published_fails_the_update(
    trainer: Engine, rollout: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    send(trainer, 1)
    with monkeypatch.context() as full:
        full.setattr(stager, "fill", fill)
        with pytest.raises(WeightSyncError, match="memory full"):
            send(trainer, 2)
    assert same(cached(rollout), weights_of(1))
    send(trainer, 2)
    assert same(cached(rollout), weights_of(2))


def test_a_new_start_is_not_taken_for_the_last_start(
    root: Path, rollout: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(is_master=True, root=root)
    connect(first, rollout)
    send(first, 0, {"weight": torch.zeros(10)})
    monkeypatch.setenv("TRINITY_SYNC_RUN_KEY", "second start")
    trainer = Engine(is_master=True, root=root)
    connect(trainer, other := Engine(root=root))
    # though step 0 of the first start is there
    assert same(receive_later(other, trainer, 0), weights_of(0))
    with pytest.raises(WeightSyncError, match=r"of another run: .* step 0 of run 2"):
        receive(rollout, 0)  # which the first start is about to update


@pytest.mark.parametrize("loads_first", [True, False])
def test_a_resume_supersedes_what_was_sent_beyond_it(
    loads_first: bool, root: Path, rollout: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(is_master=True, root=root)
    for step in (4, 5):
        send(first, step)
    monkeypatch.setenv("TRINITY_SYNC_RUN_KEY", "second start")
    trainer = Engine(is_master=True, root=root)
    with CheckpointCoordinator(root) as saves:
        if not loads_first:
            trainer.prepare()
        saves.resumed_from(3)
    with pytest.raises(WeightSyncError, match="nothing is published"):
        cached(rollout)
    for step in (3, 4):
        connect(trainer, rollout)
        send(trainer, step, {"weight": torch.full((3,), float(step))})
        assert receive(rollout, step)["weight"].tolist() == [step] * 3


def test_fewer_or_more_weights_under_the_same_step_are_refused(trainer: Engine) -> None:
    send(trainer, 1)
    fewer = weights_of(1)
    del fewer["scale"]
    with pytest.raises(ConfigError, match="uploaded again with other weights"):
        send(trainer, 1, fewer)
    with pytest.raises(ConfigError, match="uploaded again with other weights"):
        send(trainer, 1, weights_of(1) | {"more": torch.ones(1)})
    send(trainer, 1)


@pytest.mark.parametrize("step", [1, 2, None])
def test_after_weights_that_failed_midway_any_step_can_be_sent(
    trainer: Engine, rollout: Engine, step: int | None
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights_of(2).items())[:2]
        raise InterruptedError

    send(trainer, 1)
    with pytest.raises(InterruptedError):
        asyncio.run(trainer.send_weights(failing(), 2))
    assert same(cached(rollout), weights_of(1))
    send(trainer, step, weights_of(step or 1))
    assert same(cached(rollout), weights_of(step or 1))


def test_an_older_step_is_refused_after_all_ranks_have_taken_part(trainer: Engine) -> None:
    send(trainer, 2)
    weights = iter(weights_of(1).items())
    with pytest.raises(ConfigError, match=r"step 1, .* uploaded after step 2"):
        asyncio.run(trainer.send_weights(weights, 1))
    assert next(weights, None) is None


def test_without_a_step_the_last_one_is_sent_again(trainer: Engine, rollout: Engine) -> None:
    connect(trainer, rollout)
    send(trainer, None)  # veRL's first update in some trainers
    assert same(receive(rollout, None), weights_of(0))
    send(trainer, 7)
    connect(trainer, rollout)
    send(trainer, None, weights_of(7))
    assert same(receive(rollout, None), weights_of(7))
    assert rollout.version.step == 7


def test_saves_of_the_same_process_are_of_the_same_run(root: Path, trainer: Engine) -> None:
    send(trainer, 1)
    with CheckpointCoordinator(root) as saves:
        assert saves.begin() == trainer.prepare()["sender"].run


def test_without_a_root_there_is_no_engine() -> None:
    with pytest.raises(ConfigError, match="does not know the job's root"):
        Engine()
    with pytest.raises(ConfigError, match="URL"):
        Engine(root="s3://bucket/job")


def test_the_root_of_the_switch_is_the_default(root: Path) -> None:
    with environment({"TRINITY_SYNC_ROOT": str(root)}):
        assert Engine().root == root


def test_different_roots_are_refused_before_an_update(trainer: Engine, tmp_path: Path) -> None:
    elsewhere = Engine(root=tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="different roots"):
        connect(trainer, elsewhere)


def test_committed_versions_outlive_shared_memory(
    root: Path, trainer: Engine, rollout: Engine
) -> None:
    trigger = CommitsHere()
    trainer._sender = _Sender(root, commit=True, trigger=trigger)
    with CheckpointCoordinator(root, trigger=trigger) as saves:
        saves.save(1, {"model": {"weight": torch.ones(3)}})
        for step in (1, 2):
            send(trainer, step)
        trainer._sender._coordinator.wait_all(60)
    connect(trainer, rollout)
    assert same(receive(rollout, 1), weights_of(1))  # though step 2 is in memory
    assert torch.equal(load_states(root, 1, "actor")["model"]["weight"], torch.ones(3))

    for left in Path(os.environ["TRINITY_SYNC_SPOOL"]).iterdir():
        shutil.rmtree(left)
    restarted = Engine(root=root)
    assert same(cached(restarted), weights_of(2))
    assert restarted.version.source == "checkpoint"
