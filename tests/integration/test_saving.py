"""Saves through the whole of it: coordinator, Prefect server, warm worker, Ray, disk."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed

from tests.faults.slow_save import find_part
from tests.integration.prefect_api import Api, key_of, kind_of
from tests.support.waiting import until
from trinity_sync import (
    CheckpointCoordinator,
    SaveFailedError,
    SaveTimeoutError,
    Settings,
    set_job_settings,
)
from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.layout import Kind, name_job, step_folder
from trinity_sync.orchestration.quantities import format_duration, make_artifact_key
from trinity_sync.orchestration.recovery.flow_runs import recover_run
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import group_by_node, write_placement
from trinity_sync.storage.runs import open_run

STATE = {"w": torch.arange(5000.0)}


def key(saves: CheckpointCoordinator, step: int, kind: Kind = "checkpoint") -> str:
    return key_of(saves.root, step, kind)


def load(root: Path, step: int, component: str = "model", role: str = "actor") -> Any:
    path = root / f"global_step_{step}/{role}/{component}_world_size_1_rank_0.pt"
    return torch.load(path, weights_only=True)


def test_a_save_is_a_flow_run_that_can_be_read_in_the_ui(
    saves: CheckpointCoordinator, api: Api, root: Path, tmp_path: Path
) -> None:
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    states = {"model": STATE, "optim": STATE, "extra_state": {"rng": torch.get_rng_state()}}
    saves.save(40, states, metadata=metadata)
    saves.wait_all(250)
    assert torch.equal(load(root, 40)["w"], STATE["w"])
    run = api.ended(api.run_of(key(saves, 40)).id)
    assert run.name == f"{name_job(root)}: save actor step 40"
    assert {f"job:{saves.spool.folder.name}", "run:1", "step:40", "kind:checkpoint"} <= {*run.tags}
    saved = ("extra_state", "metadata", "model", "optim")
    names = ["commit", *(f"persist-{name}" for name in saved)]
    assert sorted(map(kind_of, api.ended_tasks(run, *names))) == names
    (artifact,) = api.artifacts_of(run)
    assert (artifact.type, artifact.key) == ("markdown", make_artifact_key("save", root))
    assert f"### {name_job(root)}: save actor step 40: committed" in artifact.data
    (timing,) = read_manifest(root, 40).timings
    assert f"**{format_duration(timing.stalls[0].seconds)}** (slowest rank: 0)" in artifact.data
    assert timing.queue_s + timing.write_s + timing.commit_s > 0
    assert all(f"| {component} | `" in artifact.data for component in saved)
    assert f"trinity-sync report {root}" in artifact.data
    assert run.empirical_policy.retries is None  # telling that there are none takes a call
    logged = until(lambda: [line for line in api.logs_of(run) if "committed in" in line], "the log")
    assert logged == [artifact.description]


TRAINER = """
import contextlib, os, sys
STACK = {"prefect", "fastapi", "sqlalchemy", "alembic", "typer", "rich", "ray"}
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STACK:
            raise ModuleNotFoundError(f"{name} is not installed where people train")
sys.meta_path.insert(0, Refuses())

import torch
from trinity_sync import CheckpointCoordinator

how = dict(world_size=2, run_key="one")
ranks = [CheckpointCoordinator(sys.argv[1], rank=rank, **how) for rank in range(2)]
for rank in ranks:
    rank.save(1, {"model": {"w": torch.ones(3)}})
for rank in reversed(ranks):
    rank.wait_all(250)
for rank in reversed(ranks):
    for fd in os.listdir("/proc/self/fd"):  # of a connection, or an event loop
        with contextlib.suppress(FileNotFoundError):
            kept = os.readlink(f"/proc/self/fd/{fd}")
            assert not kept.startswith(("socket:", "anon_inode:[eventpoll]")), kept
    rank.close()
assert "httpx" not in sys.modules
assert not STACK & sys.modules.keys()
print(*(len(rank.commit_seconds) for rank in ranks))
"""


def test_a_trainer_on_a_stack_needs_no_package_of_it_no_event_loop_and_no_connection(
    stack: StackState, root: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(root)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 1\n"
    require_committed(root, 1)


def test_saves_leave_no_functions_behind_in_ray(
    saves: CheckpointCoordinator, stack: StackState
) -> None:
    """Prefect's runner makes one a task, which Ray keeps for as long as the worker lives."""
    count = (
        "import sys; from ray._raylet import GcsClient; ray = GcsClient(address=sys.argv[1]);"
        "print(len(ray.internal_kv_keys(b'RemoteFunction:', b'fun')))"
    )

    def functions() -> int:  # by a process that reads how to log in when it imports Ray
        asked = [sys.executable, "-c", count, stack.ray_address]
        env = {**os.environ, **(stack.ray_auth or {})}
        return int(
            subprocess.run(asked, env=env, check=True, capture_output=True, text=True).stdout
        )

    counts = []
    for step in range(1, 4):
        saves.save(step, {"model": STATE})
        saves.wait_all(250)
        counts.append(functions())
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


def test_actor_and_critic_are_one_flow_run_and_one_commit(
    stack: StackState, stack_settings: Settings, root: Path, api: Api
) -> None:
    """A defect of the system that trinity_sync replaces: the critic's save was not counted."""
    with CheckpointCoordinator(
        root, roles=["actor", "critic"], settings=stack_settings, require_stack=True
    ) as saves:
        saves.save(6, {"model": STATE}, role="actor")
        assert read_manifest(root, 6) is None
        saves.save(6, {"model": {"v": torch.ones(3)}}, role="critic")
        saves.wait_all(250)
        assert api.run_of(key(saves, 6)).name.endswith(": save actor+critic step 6")
    assert require_committed(root, 6).roles == ("actor", "critic")
    assert load(root, 6, role="critic")["v"].tolist() == [1, 1, 1]


def test_saves_by_functions_alone_commit_once_they_are_registered(
    saves: CheckpointCoordinator, root: Path, api: Api
) -> None:
    path = root / "global_step_8/actor/dist_ckpt.bin"

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"megatron")

    saves.save_async("model_state_dict", write, 8, is_state_dict=True)
    asyncio.run(saves.register_and_monitor(8, is_state_dict=True, state_dict_thread_count=1))
    saves.wait_all(250)
    manifest = require_committed(root, 8)
    assert manifest.kinds == ("state_dict",)
    assert [file.path for file in manifest.files] == ["actor/dist_ckpt.bin"]
    assert (root / "latest_state_dict_iteration.txt").read_text() == "8"

    run = api.ended(api.run_of(key(saves, 8, "state_dict")).id)
    api.press_retry(run)
    again = until(lambda: (r := api.ended(run.id)).run_count > 1 and r, "the end of the retry")
    assert again.state.is_completed(), again.state.message
    assert require_committed(root, 8).files == manifest.files


def test_a_clock_that_is_an_hour_ahead_holds_up_neither_a_save_nor_its_retry(
    saves: CheckpointCoordinator,
    api: Api,
    stack_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr("prefect.states.now", lambda: later)
    saves.save(3, {"model": STATE})
    saves.wait_all(250)

    run = api.ended(api.run_of(key(saves, 3)).id)

    async def crash() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(run.id, Crashed(), force=True)

    async def retry(server: PrefectApi) -> None:  # nothing happens while the worker has its lock
        here = f"{stack_settings.node}/1/1"
        await recover_run(server, run.id, here, spool=stack_settings.spool)

    def ended_again() -> FlowRun | None:
        ask_server(stack_settings, retry)
        found = api.ended(run.id)
        return found if found.run_count > 1 else None

    asyncio.run(crash())
    again = until(ended_again, "the end of the retry")
    assert again.state.is_completed(), again.state.message


def test_a_failed_save_function_is_seen_everywhere_and_blocks_nothing_later(
    saves: CheckpointCoordinator, root: Path, api: Api
) -> None:
    """A defect of the system that trinity_sync replaces: ``wait_all()`` hid failed saves."""

    def fail() -> None:
        raise RuntimeError("no adapter to save")

    saves.save_async("lora", fail, 9)
    saves.save(9, {"model": STATE})
    with pytest.raises(SaveFailedError) as caught:
        saves.wait_all(250)
    assert "no adapter to save" in str(caught.value)
    assert "save actor step 9" in str(caught.value)
    run = api.ended(api.run_of(key(saves, 9)).id)
    assert run.state.is_failed()
    (commit,) = (task for task in api.ended_tasks(run, "commit") if kind_of(task) == "commit")
    assert commit.run_count == 1  # nothing that another attempt could repair
    (page,) = [each.data for each in api.artifacts_of(run) if each.type == "markdown"]
    for words in ("step 9: failed", "no adapter to save", f"trinity-sync retry {root} 9"):
        assert words in page
    assert "1 image still in memory" in page
    assert read_manifest(root, 9) is None
    for step in (10, 11, 12):
        saves.save(step, {"model": STATE})
        saves.wait_all(250)
    assert find_newest(root).step == 12


def test_a_failed_function_is_raised_even_if_an_earlier_wait_timed_out(
    saves: CheckpointCoordinator,
) -> None:
    def fail() -> None:
        raise RuntimeError("no adapter to save")

    saves.save(20, {"model": {"w": torch.zeros(10_000_000)}})
    saves.save_async("lora", fail, 21)
    with pytest.raises(SaveTimeoutError, match="step20"):
        saves.wait_all(0.2)
    with pytest.raises(SaveFailedError, match="no adapter"):
        saves.wait_all(250)


def test_saves_of_one_name_run_one_after_the_other(saves: CheckpointCoordinator) -> None:
    import threading

    order: list[str] = []
    gate = threading.Event()

    def first() -> None:
        assert gate.wait(250)
        order.append("first")

    saves.save_async("same", first, 13)
    saves.save_async("same", lambda: order.append("second"), 14)
    gate.set()
    saves.wait_all(250)
    assert order == ["first", "second"]


def test_a_save_that_a_later_run_has_superseded_leaves_no_files(
    saves: CheckpointCoordinator, root: Path
) -> None:
    saves.save(17, {"model": STATE})
    saves.wait_all(250)
    open_run(root, "second", resumed_from=17)
    saves.save(18, {"model": STATE})
    with pytest.raises(SaveFailedError, match="run 2 resumed from step 17"):
        saves.wait_all(250)
    assert [path for path in step_folder(root, 18).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"root": "relative/path"}, "is not absolute"),
        ({"step": -1}, "less than the minimum of 0"),
        ({"components": ["model", "wings"]}, "'wings' is not one of"),
        ({}, "node no-such-node, which holds role actor rank 0, is not in this Ray"),
    ],
)
def test_bad_parameters_are_rejected_with_a_sentence(
    api: Api, root: Path, change: dict[str, Any], sentence: str
) -> None:
    places = group_by_node([("no-such-node", "/dev/shm/x")])
    write_placement(root, 1, "", "actor", places)
    set_job_settings(root, {"rank_timeout_s": 1})  # after which no saver will commit it
    good = {"root": str(root), "step": 1, "run": 1}
    try:
        run = api.ended(api.start({"request": {**good, **change}}))
    except PrefectHTTPStatusError as error:  # the form's own check
        said = str(error)
    else:
        assert run.state.is_failed()
        said = run.state.message
    assert sentence in said


def test_a_save_that_no_worker_begins_is_committed_by_the_saver_and_its_run_says_so(
    stack: StackState, stack_settings: Settings, api: Api, root: Path
) -> None:
    settings = stack_settings.model_copy(update={"saver": "auto", "saver_after_s": 5.0})
    worker = find_part(stack_settings, "worker")
    worker.suspend()
    try:
        with CheckpointCoordinator(root, settings=settings) as saves:
            saves.save(40, {"model": STATE})
            saves.wait_all(250)
        run = api.run_of(key_of(root, 40))
        assert not run.state.is_final()
    finally:
        worker.resume()
    state = api.ended(run.id).state
    assert state.is_completed()
    assert "Committed by the saver" in str(state.message)
    (timing,) = require_committed(root, 40).timings
    assert timing.by_saver


def test_a_database_that_is_locked_for_long_holds_no_save(
    stack: StackState, stack_settings: Settings, api: Api, root: Path
) -> None:
    patient = {"saver": "auto", "saver_after_s": 600.0, "slots": 1}
    saves = CheckpointCoordinator(root, settings=stack_settings.model_copy(update=patient))
    with closing(sqlite3.connect(stack_settings.home / "prefect/prefect.db")) as backup:
        backup.execute("BEGIN EXCLUSIVE")
        for step in (50, 51):
            saves.save(step, {"model": STATE})
        assert require_committed(root, 50).timings[0].by_saver
        backup.rollback()
    saves.wait_all(250)
    saves.close()
    for step in (50, 51):
        assert api.ended(api.run_of(key_of(root, step)).id).state.is_completed()
