"""Updates of a vLLM server: under load, with processes killed in the middle."""

import multiprocessing
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environments.vllm.engines import (
    PROMPTS,
    Server,
    expect,
    expect_one,
    make_model,
    publish,
    randomize,
    running_server,
)
from trinity_sync import CheckpointCoordinator, RolloutLedger
from trinity_sync.integrations.vllm import VLLMUpdater

pytestmark = pytest.mark.timeout(600)

LONG = 96
"""Tokens of an answer that is longer than the time between two updates."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(1000).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server that takes updates."""
    backend = '--weight-transfer-config={"backend": "trinity_sync"}'
    with running_server(folder, folder / "server.log", backend, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_updates_while_requests_are_in_flight(server: Server, root: Path, pause: str) -> None:
    model = make_model(0)
    answers: list[tuple[list[int], list[tuple[str, int, int]]]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(server.ask(PROMPTS[0], LONG))

    with (
        CheckpointCoordinator(root) as saves,
        VLLMUpdater(server.url, root) as updater,
        ThreadPoolExecutor(3) as clients,
    ):
        steps = range(1, 8)
        publish(saves, 1, randomize(model, 1).state_dict())
        updater.update()
        asking = [clients.submit(ask) for _ in range(3)]
        for step in steps:
            if step > 1:
                publish(saves, step, randomize(model, step).state_dict())
                assert updater.update(min_step=step, pause=pause) == step
            before = len(answers)
            while len(answers) < before + 4 and not any(each.done() for each in asking):
                done.wait(0.01)  # of three requests in flight, the fourth began after the update
        done.set()
        for each in asking:
            each.result()

    assert {version for _, spans in answers for version, *_ in spans} == set(map(str, steps))
    mixed = [spans for _, spans in answers if len(spans) > 1]
    assert bool(mixed) == (pause == "keep")
    for number, (tokens, spans) in enumerate(answers):
        for version, start, end in spans:
            before = PROMPTS[0] + tokens[:start]  # of which the new weights compute the cache
            model = make_model(int(version))
            assert tokens[start:end] == expect_one(model, before, end - start)
        ledger = RolloutLedger()
        ledger.issue([number])
        ledger.finish([number], {number: [(int(v), start, end - 1) for v, start, end in spans]})
        ledger.train([number], 7)
        assert sum(ledger.ages(7).values()) == len(tokens)
        if len(spans) > 1:  # the version at its end did not make all of it
            assert tokens != expect_one(model, PROMPTS[0], len(tokens))


def train_for_ever(root: Path, started: "multiprocessing.synchronize.Event") -> None:
    model = make_model(0)
    with CheckpointCoordinator(root) as saves:
        for step in range(1, 100_000):
            saves.upload(step, randomize(model, step).state_dict)
            started.set()


def test_trainers_killed_while_they_publish_leave_whole_versions(
    server: Server, root: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    chance = random.Random(1)
    with VLLMUpdater(server.url, root) as updater:
        for _ in range(5):
            started = spawn.Event()
            trainer = spawn.Process(target=train_for_ever, args=(root, started))
            trainer.start()
            assert started.wait(250)
            for _ in range(5):
                updater.update()
            trainer.join(chance.random() / 10)
            trainer.kill()
            trainer.join()
            step = updater.update()
            assert server.ask_all() == expect(make_model(step))
