"""An updater and what a vLLM worker does to read a version, without vLLM.

The server here answers vLLM's calls over HTTP; in place of a worker it opens the version that the
updater names, as a worker does. ``tests/environments/vllm`` has the same with the real engine.
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.support.answers import serving
from tests.support.forked import Program
from tests.support.states import differences
from trinity_sync import CheckpointCoordinator, ConfigError, WeightReader, WeightSyncError
from trinity_sync.fs.process import read_process_identity
from trinity_sync.integrations.vllm import VLLMUpdater
from trinity_sync.integrations.vllm.pinned_version import (
    Wanted,
    end_claim,
    make_claim,
    pin_version,
    require_free,
    select_version,
)


class Engine:
    """What stands behind the server."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = "default"
        self.weights: dict[str, torch.Tensor] = {}
        self.root = ""
        self.is_updating = False
        self.claim: dict[str, Any] = {}
        self.failing: list[str] = []
        """Calls that fail once."""
        self.before_loading: Callable[[], None] = lambda: None

    def answer(self, path: str, query: str, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(path + (f"?{query}" if query else ""))
        if path in self.failing:
            self.failing.remove(path)
            raise WeightSyncError("not now")
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            require_free(self.claim, info.get("claim", {}))
            self.root, self.claim = info["root"], info.get("claim", {})
        elif path == "/start_weight_update":
            if self.is_updating:
                raise WeightSyncError("an update is in progress")
            self.is_updating = True
        elif path == "/update_weights":
            self.load(Wanted(**body["update_info"]))
        elif path == "/finish_weight_update":
            self.is_updating, self.claim = False, end_claim(self.claim)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return {"weight_version": self.version}

    def load(self, wanted: Wanted) -> None:
        self.before_loading()
        with WeightReader(root=self.root, name="worker", timeout_s=0.2) as reader:
            version = select_version(reader, self.root, "actor", wanted)
            with pin_version(reader, version) as view:
                self.weights = {name: tensor.clone() for name, tensor in view.iter_views()}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    def answer(request: BaseHTTPRequestHandler, text: str) -> tuple[int, str]:
        parts = urlsplit(request.path)
        try:
            found = engine.answer(parts.path, parts.query, json.loads(text or "{}"))
        except WeightSyncError as error:
            return 500, json.dumps({"error": str(error)})
        return 200, json.dumps(found)

    with serving(answer) as url:
        yield url


@pytest.fixture
def saves(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "spool").mkdir(mode=0o700)
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(tmp_path / "spool"))
    with CheckpointCoordinator(root) as saves:
        yield saves


@pytest.fixture
def updater(url: str, root: Path, saves: CheckpointCoordinator) -> Iterator[VLLMUpdater]:
    with VLLMUpdater(url, root) as updater:
        yield updater


def publish(saves: CheckpointCoordinator, step: int) -> dict[str, torch.Tensor]:
    state = {"w": torch.full((3000,), float(step)), "b": torch.full((3,), float(step))}
    saves.upload(step, lambda: state)
    saves.wait_staged()
    return state


def test_an_update_pauses_the_engine_and_names_the_version(
    engine: Engine, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    state = publish(saves, 7)
    assert updater.get_served_step() is None
    assert updater.update() == 7
    assert differences(state, engine.weights) == []
    assert engine.calls[-7:] == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/pause?mode=wait",
        "/update_weights",
        "/update_weight_version",
        "/resume",
        "/finish_weight_update",
    ]
    assert updater.get_served_step() == 7
    engine.calls.clear()
    assert updater.update() == 7
    assert engine.calls == ["/weight_info"]  # it serves the newest
    engine.version = "default"  # the engine was started again
    assert updater.update() == 7
    assert engine.calls.count("/update_weights") == 1
    updater.version = None  # vLLM's sleep has discarded the weights, and not their version
    assert updater.update() == 7
    assert engine.calls.count("/update_weights") == 2


def test_an_updater_that_runs_on_follows_the_training_that_begins_again_in_the_root(
    engine: Engine, root: Path, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    publish(saves, 7)
    assert updater.update() == 7
    saves.close()
    for step, value in ((7, 3.0), (2, 4.0)):  # the same step, and an earlier one
        shutil.rmtree(root)
        with CheckpointCoordinator(root) as again:
            state = {"w": torch.full((3000,), value)}
            again.upload(step, lambda: state)  # noqa: B023
            again.wait_staged()
            assert updater.update() == step
            assert engine.weights["w"].unique().tolist() == [value]


def test_the_version_stays_until_the_engine_has_it(
    engine: Engine, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    def publish_more() -> None:
        for step in range(2, 6):
            publish(saves, step)

    publish(saves, 1)
    engine.before_loading = publish_more
    assert updater.update() == 1
    assert engine.weights["w"].unique().tolist() == [1]
    engine.before_loading = lambda: None
    assert updater.update(pause="keep") == 5
    assert engine.weights["w"].unique().tolist() == [5]
    assert engine.calls.count("/pause?mode=wait") == 1


def test_a_refusal_ends_the_update_and_the_engine_goes_on(
    engine: Engine, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    def refuse() -> None:
        raise WeightSyncError("q_proj does not fit the model")

    publish(saves, 1)
    engine.before_loading = refuse
    with pytest.raises(WeightSyncError, match=r"500.*q_proj does not fit"):
        updater.update(pause="keep")
    assert engine.calls[-3:] == ["/update_weights", "/resume", "/finish_weight_update"]
    assert updater.get_served_step() is None
    engine.failing = ["/pause"]
    with pytest.raises(WeightSyncError, match="/pause answered"):
        updater.update()
    assert engine.calls[-2:] == ["/resume", "/finish_weight_update"]


def test_following_updates_at_each_version(
    engine: Engine, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    publish(saves, 1)
    served = []
    for step in updater.follow(timeout_s=0.1):
        served.append(step)
        if step < 4:
            publish(saves, step + 1)
    assert served == [1, 2, 3, 4]


def test_what_is_wrong_is_named(url: str, root: Path, saves: CheckpointCoordinator) -> None:
    updater = VLLMUpdater(url, root)
    with pytest.raises(WeightSyncError, match="no version of step 3 or later"):
        updater.update(min_step=3, timeout_s=0.01)
    updater = VLLMUpdater("http://127.0.0.1:9", root)
    with pytest.raises(WeightSyncError, match="does the vLLM server run"):
        updater.get_served_step()
    with pytest.raises(ConfigError, match="pass an LLM, or the URL"):
        VLLMUpdater(object(), root)


def test_a_step_is_selected_exactly(root: Path, saves: CheckpointCoordinator) -> None:
    publish(saves, 1)
    publish(saves, 2)
    with WeightReader(root=root, name="worker", timeout_s=0.2) as reader:
        newest = select_version(reader, str(root), "actor", Wanted())
        assert newest.step == 2
        assert select_version(reader, str(root), "actor", Wanted(step=2, run=1)) == newest
        newest_is = "load the newest, 2 of run 1"
        with pytest.raises(WeightSyncError, match=rf"step=1, run=None .*{newest_is}"):
            select_version(reader, str(root), "actor", Wanted(step=1))
        with pytest.raises(WeightSyncError, match=rf"step=None, run=2 .*{newest_is}"):
            select_version(reader, str(root), "actor", Wanted(run=2))
        places = [asdict(image) for image in newest.images]
        for step in range(3, 9):
            publish(saves, step)
        gone = select_version(reader, str(root), "actor", Wanted(2, 1, places))
        message = "version 2 of run 1 is gone; load the newest, 8"
        with pytest.raises(WeightSyncError, match=message), pin_version(reader, gone):
            pass


def test_an_update_that_a_killed_updater_left_open_is_ended(
    engine: Engine, url: str, root: Path, saves: CheckpointCoordinator, updater: VLLMUpdater
) -> None:
    script = "import sys; from trinity_sync.integrations.vllm import VLLMUpdater as Updater; "
    script += "Updater(*sys.argv[1:]).update()"
    publish(saves, 1)
    killed = Program(script, url, root)

    def kill() -> None:
        engine.before_loading = lambda: None
        killed.kill()
        killed.wait()

    engine.before_loading = kill
    killed.end(-signal.SIGKILL)
    publish(saves, 2)
    assert updater.update() == updater.get_served_step() == 2
    assert engine.weights["w"].unique().tolist() == [2]


def test_of_two_updaters_the_one_that_comes_second_is_refused(
    engine: Engine, url: str, root: Path, saves: CheckpointCoordinator
) -> None:
    def update_meanwhile() -> None:
        engine.before_loading = lambda: None
        publish(saves, 2)
        with pytest.raises(WeightSyncError, match=r"process \d+/\d+ .*use one updater"):
            second.update()

    publish(saves, 1)
    engine.before_loading = update_meanwhile
    with VLLMUpdater(url, root) as first, VLLMUpdater(url, root) as second:
        assert first.update() == first.get_served_step() == 1
        assert engine.weights["w"].unique().tolist() == [1]
        assert [call for call in engine.calls if "/pause" in call or call == "/resume"] == [
            "/pause?mode=wait",
            "/resume",
        ]
        assert second.update() == first.get_served_step() == 2
        assert engine.weights["w"].unique().tolist() == [2]


def test_an_updater_on_another_host_is_waited_for_until_its_calls_have_timed_out(
    engine: Engine, url: str, root: Path, saves: CheckpointCoordinator
) -> None:
    publish(saves, 1)
    engine.is_updating = True
    with VLLMUpdater(url, root) as updater, WeightReader(root=root, name="other") as reader:
        with reader.open() as view:
            engine.claim = {**make_claim("first", 60, view.version), "namespace": "elsewhere"}
        with pytest.raises(WeightSyncError, match="use one updater"):
            updater.update()
        engine.claim["until"] = time.time() - 1
        assert updater.update() == 1


def test_an_engine_belongs_to_a_job_while_its_updater_lives(
    engine: Engine, url: str, root: Path, saves: CheckpointCoordinator, tmp_path: Path
) -> None:
    publish(saves, 1)
    with (
        VLLMUpdater(url, root) as updater,
        CheckpointCoordinator(tmp_path / "theirs") as theirs,
        VLLMUpdater(url, tmp_path / "theirs") as other,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living,
    ):
        publish(theirs, 2)
        assert updater.update() == 1
        engine.claim["process"] = read_process_identity(living.pid)  # of the first updater
        with pytest.raises(WeightSyncError, match=rf"with the job in {root}; use one updater"):
            other.update()
        assert engine.version == "1"
        publish(saves, 3)
        assert VLLMUpdater(url, root).update() == 3  # of the same job
        engine.claim["process"] = read_process_identity(living.pid)
        living.kill()
        living.wait()
        assert other.update() == 2


def test_an_engine_that_was_started_again_gets_the_newest_version_again(
    engine: Engine,
    url: str,
    root: Path,
    saves: CheckpointCoordinator,
    updater: VLLMUpdater,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinity_sync.integrations.vllm.updater.CHECK_S", 0.01)
    publish(saves, 1)
    steps = updater.follow()
    assert next(steps) == 1
    engine.version, engine.weights = "default", {}
    engine.failing = ["/weight_info"]  # as it does before it is up
    assert next(steps) == updater.get_served_step() == 1
    assert engine.weights["w"].unique().tolist() == [1]


def test_a_resumed_run_below_the_least_step_is_waited_for(
    root: Path, saves: CheckpointCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(saves, 60)
    with WeightReader(root=root, name="worker") as reader:
        assert select_version(reader, str(root), "actor", Wanted(min_step=50)).step == 60
        saves.close()
        monkeypatch.setenv("TRINITY_SYNC_RUN_KEY", "second")
        with CheckpointCoordinator(root) as resumed:
            publish(resumed, 21)
            with pytest.raises(WeightSyncError, match="no version of step 50"):
                select_version(reader, str(root), "actor", Wanted(min_step=50, timeout_s=0.05))
