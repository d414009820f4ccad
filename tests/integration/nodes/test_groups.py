"""A save on so many nodes that they are persisted in groups: here two groups on three nodes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import torch
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

from tests.integration.nodes.joined import joined, kill
from tests.integration.prefect_api import Api
from tests.support.job import Job
from tests.support.waiting import until
from trinity_sync import Settings
from trinity_sync.saves.journal import append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState, build_environment
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import group_by_node, write_placement

pytestmark = pytest.mark.slow

ROLES = ("actor", "critic")
COMPONENTS = ("model", "optim")

RUN = """
import asyncio, os, sys
import ray
import flows.save, flows.save
from trinity_sync.saves.save_request import SaveRequest

flows.save.MOST_SINGLE_NODES = 1
flows.save.NODES_PER_GROUP = 2
ray.init(os.environ["TRINITY_SYNC_STACK__RAY__ADDRESS"], log_to_driver=False)
request = SaveRequest.model_validate_json(sys.argv[1])
state = asyncio.run(flows.save.save_step(request, return_state=True))
print(state.state_details.flow_run_id, flush=True)
"""
"""Runs the flow as the worker does, with the numbers of a save on many nodes made small."""


@dataclass
class World:
    """A job on three Ray nodes: the actor has a rank on the first and the last, the critic one."""

    root: Path
    stack: StackState
    api: Api
    jobs: dict[str, Job]
    second: Daemon

    @property
    def first(self) -> str:
        """Name of the first node."""
        return next(iter(self.jobs))

    def stage(self, step: int, *nodes: str) -> None:
        """Submit the images of the nodes' ranks."""
        first, second, third = self.jobs
        for node, role, rank, size in (
            (first, "actor", 0, 2),
            (second, "critic", 0, 1),
            (third, "actor", 1, 2),
        ):
            job = self.jobs[node]
            job.world_size = size
            if node in nodes:
                states = {name: {"w": torch.arange(1000.0) + rank} for name in COMPONENTS}
                job.stage(step, states, role=role, rank=rank)
        where = [(name, str(job.spool.folder)) for name, job in self.jobs.items()]
        write_placement(self.root, 1, "", "actor", group_by_node([where[0], where[2]]))
        write_placement(self.root, 1, "", "critic", group_by_node([where[1]]))

    def request(self, step: int) -> SaveRequest:
        names = {"roles": ROLES, "components": COMPONENTS}
        return SaveRequest(root=str(self.root), step=step, run=1, **names)  # type: ignore[arg-type]

    @contextmanager
    def saving(self, step: int) -> "Iterator[subprocess.Popen[str]]":
        """A process that runs the flow; it prints the flow's logs and the id of the flow run."""
        command = [sys.executable, "-c", RUN, self.request(step).model_dump_json()]
        env = build_environment(Settings(node=self.first), StackSettings(), self.stack)
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, env=env, text=True, **out) as process:
            yield process

    def ended(self, process: "subprocess.Popen[str]") -> "Seen":
        """What the UI shows of the run, once it has ended."""
        out, _ = process.communicate(timeout=250)
        run = self.api.ended(UUID(out.split()[-1]))
        tasks = self.api.ended_tasks(run, "persist", "persist")
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        with self.api.client as client:
            logs = [log.message for log in client.read_logs(wanted)]
        return Seen(
            run.state.is_completed(),
            {task.name: (task.state and task.state.message) or "" for task in tasks},
            logs,
            "".join(each.data for each in self.api.artifacts_of(run) if isinstance(each.data, str)),
        )


@dataclass
class Seen:
    """What the UI shows of a run."""

    committed: bool
    tasks: dict[str, str]
    """Messages of the task runs' states, by name."""
    logs: list[str]
    page: str


@pytest.fixture
def world(
    stack: StackState, stack_settings: Settings, root: Path, api: Api, spool_folder: Path
) -> Iterator[World]:
    with (
        joined(stack, stack_settings, "second") as (two, daemon),
        joined(stack, stack_settings, "third") as (three, _),
    ):
        spools = {stack_settings.node: spool_folder, "second": two.spool, "third": three.spool}
        jobs = {
            name: Job(root, open_job_spool(spool, root), roles=ROLES)
            for name, spool in spools.items()
        }
        yield World(root, stack, api, jobs, daemon)
        for job in jobs.values():
            job.close()


def test_only_what_failed_is_repeated_and_a_node_that_fails_for_good_is_named(world: World) -> None:
    folder = world.root / "global_step_1"
    folder.mkdir()
    (folder / "critic").touch()  # where the critic's node makes a folder
    world.stage(1, *world.jobs)
    with world.saving(1) as process:
        files = ("actor/.model*", "actor/.optim*")
        until(lambda: all([*folder.glob(each)] for each in files), "the other nodes to persist")
        (folder / "critic").unlink()
        seen = world.ended(process)
    assert seen.committed
    assert len(require_committed(world.root, 1).files) == 6
    groups = [f"persist @ {world.first} .. third", "persist @ second"]
    assert [name for name in sorted(seen.tasks) if "persist" in name] == sorted(groups)

    folder = world.root / "global_step_2"
    folder.mkdir()
    (folder / "critic").touch()
    world.stage(2, *world.jobs)
    with world.saving(2) as process:
        seen = world.ended(process)
    assert not seen.committed
    assert read_manifest(world.root, 2) is None
    assert sum("node second, model: " in log for log in seen.logs) == 1
    assert "1 of 1 nodes failed: second\nsecond, model of rank 0: " in seen.tasks[groups[1]]
    assert "| `second` | model of rank 0 | " in seen.page
    assert "| `third` |" not in seen.page
    assert f"2 on `{world.first}`, 2 on `third`, 2 on `second`" in seen.page

    (folder / "critic").unlink()
    with world.saving(2) as process:  # as a retry of the flow run
        assert world.ended(process).committed
    assert len(require_committed(world.root, 2).files) == 6


def test_a_node_that_dies_is_named_and_fails_the_save(world: World) -> None:
    world.stage(1, world.first, "third")  # a task on the second waits for its rank
    with world.saving(1) as process:

        def waits() -> bool:
            every = psutil.Process(world.second.pid).children(recursive=True)
            return any(each.name().startswith("ray::persist") for each in every)

        until(waits, "the task on the second node")
        kill(world.second)
        request = world.request(1)
        left = until(lambda: (told := read_entry(request)) and told.is_left and told, "the end")
        append(request, "failed", left.message, over=left)  # as a saver that commits nothing
        seen = world.ended(process)
    assert not seen.committed
    assert read_manifest(world.root, 1) is None
    lost = "node second, which holds role critic rank 0, has not written them"
    state = seen.tasks["persist @ second"]
    assert "1 of 1 nodes failed: second\nsecond, model: save actor+critic step 1 of " in state
    assert lost in state
    assert lost in seen.page
    assert f"2 on `{world.first}`, 2 on `third`" in seen.page
