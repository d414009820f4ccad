"""What one save costs the control plane, from 1 rank on 1 node to 4,096 ranks on 512.

::

    python -m benchmarks.scale [RANKSxNODES ...]
    python -m benchmarks.scale --files RANKSxNODES ...   # the bodies of the tasks, without Prefect

Real are the Prefect server, the trigger, the flow, its tasks and their bodies, tickets, manifest,
files and catalog. Simulated are the ranks (this process seals a tiny image of each component for
each of them) and the nodes: each is a spool of its own, but tasks run in threads of this process
and not on a Ray node of that name, because 512 Ray nodes cannot be had on one machine. So what Ray
adds, which is a worker process a task, and what a network adds, is not in the figures.

Of each size one save counts; one of a single rank comes first and does not. Growth is judged:
nothing may grow faster than the nodes, and API calls not at all with ranks.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulated import Job

RESULTS = Path(__file__).parent / "results"
SIZES = ((1, 1), (8, 1), (64, 1), (8, 8), (64, 8), (256, 32), (1024, 128))
MOST_NODES = 512
SLACK = 1.5
"""By how much a cost a node may be larger with more nodes before it counts as growing faster."""


@dataclass(frozen=True)
class Cost:
    """Of one save."""

    ranks: int
    nodes: int
    flow_runs: int
    task_runs: int
    api_calls: int
    """HTTP requests of trigger, flow and tasks; task states go over one websocket besides."""
    parameter_bytes: int
    trigger_to_end_s: float
    """Until the flow run has ended, which is after the commit: other nodes' slots are freed."""
    catalog_rows: int
    catalog_ms: float
    server_cpu_s: float


def main() -> None:
    """Measure, print, judge and write down."""
    named = [each for each in sys.argv[1:] if each != "--files"]
    sizes = [(int(a), int(b)) for a, b in (each.split("x") for each in named)] or SIZES
    with (
        tempfile.TemporaryDirectory(prefix="bench-scale-") as folder,
        tempfile.TemporaryDirectory(prefix="trinity_sync-scale-", dir="/dev/shm") as memory,
    ):
        os.environ |= {
            "TRINITY_SYNC_HOME": f"{folder}/home",
            "TRINITY_SYNC_SPOOL": memory,
            "TRINITY_SYNC_STACK__MAINTENANCE__SCHEDULES": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
            "DO_NOT_TRACK": "1",
        }
        if "--files" in sys.argv:
            for number, (ranks, nodes) in enumerate(sizes):
                job = Job(Path(folder) / f"job{number}", Path(memory), ranks, nodes)
                print(save_without_prefect(job, 1), flush=True)
                job.close()
            return
        costs = []
        with prefect_server() as server:
            print(_row([name.replace("_", " ") for name in asdict(_nothing())]))
            for number, (ranks, nodes) in enumerate([(1, 1), *sizes]):
                job = Job(Path(folder) / f"job{number}", Path(memory), ranks, nodes)
                cost = asyncio.run(save(job, 1, server))
                job.close()
                if number:
                    costs.append(cost)
                    print(_row(list(asdict(cost).values())), flush=True)
                    written = json.dumps([asdict(each) for each in costs], indent=1)
                    (RESULTS / "scale.json").write_text(written + "\n")
    found = judged(costs)
    print("\n".join(found) or "nothing grows faster than the nodes; API calls not with ranks")
    sys.exit(bool(found))


def judged(costs: Sequence[Cost]) -> list[str]:
    """What grows faster than it may."""
    wrong = []
    by_size = sorted(costs, key=lambda cost: (cost.nodes, cost.ranks))
    for small in by_size:
        for large in by_size:
            if small.nodes == large.nodes and small.ranks < large.ranks:
                if large.api_calls > SLACK * small.api_calls:
                    wrong.append(f"API calls grow with ranks: {small} {large}")
            elif (
                small.ranks * large.nodes == large.ranks * small.nodes and small.nodes < large.nodes
            ):
                times = large.nodes / small.nodes
                for name in (
                    "task_runs",
                    "api_calls",
                    "parameter_bytes",
                    "trigger_to_end_s",
                    "catalog_rows",
                    "catalog_ms",
                    "server_cpu_s",
                ):
                    a, b = getattr(small, name), getattr(large, name)
                    if b > SLACK * times * a:
                        wrong.append(
                            f"{name} grows faster than the nodes: {a} at {small.nodes}, {b} at "
                            f"{large.nodes}"
                        )
    return wrong


async def save(job: Job, step: int, server: int) -> Cost:
    """Stage it on all ranks, have it asked for, run it here; what that cost."""
    from prefect import get_client
    from prefect.flow_engine import run_flow

    from benchmarks.resources import cpu_seconds
    from flows.save import save_step
    from trinity_sync.client.save_trigger import SaveTrigger
    from trinity_sync.settings import Settings
    from trinity_sync.storage.manifest import read_manifest

    request = job.stage(step)
    before, cpu = CALLS.number, cpu_seconds([server])
    began = time.perf_counter()
    trigger = SaveTrigger()
    trigger.submit(request)
    await trigger.send()
    await trigger.disconnect()
    async with get_client() as client:
        run = await asked_for(client, request.key)
        await run_flow(here(save_step), flow_run=run, return_type="state")  # type: ignore[misc]
        calls = CALLS.number - before
        manifest = read_manifest(job.root, step)
        assert manifest, f"{request.run_name} of {job.ranks} ranks is not committed"
        ended = time.perf_counter() - began
        tasks = await _tasks_of(client, run.id)
    cost = Cost(
        job.ranks,
        job.nodes,
        1,
        tasks,
        calls,
        len(json.dumps(request.flow_run["parameters"])),
        round(ended, 2),
        *_catalog(job.root, step, Settings()),
        0.0,
    )
    return replace(cost, server_cpu_s=round(cpu_seconds([server]) - cpu, 2))


def save_without_prefect(job: Job, step: int) -> str:
    """CPU seconds of the bodies of the tasks, one after the other, and what comes out of them."""
    from trinity_sync.layout import MANIFEST
    from trinity_sync.orchestration.on_node.save import make_save
    from trinity_sync.settings import Settings
    from trinity_sync.storage.commit import commit
    from trinity_sync.storage.persist import WriteOptions, persist
    from trinity_sync.storage.placement import await_node_shards

    request = job.stage(step)
    save = make_save(request)
    shares = await_node_shards(save, rank_timeout_s=60)
    times = [time.process_time()]
    written = [
        file
        for share in shares
        for component in request.components
        if component != "metadata" or share.has_rank_0
        for file in persist(share, save, component, WriteOptions())
    ]
    times.append(time.process_time())
    commit(save, written)
    times.append(time.process_time())
    rows, took_ms = _catalog(job.root, step, Settings())
    nbytes = (save.folder / MANIFEST).stat().st_size
    return (
        f"{job.ranks} ranks on {job.nodes} nodes: {times[1] - times[0]:.2f} CPU seconds to persist "
        f"on all nodes, {times[2] - times[1]:.2f} to commit; manifest of {nbytes:,} bytes, "
        f"{rows:,} rows of the catalog in {took_ms:,.0f} ms"
    )


class CALLS:
    """HTTP requests of this process, counted where httpx sends them."""

    number = 0

    @classmethod
    def count(cls) -> None:
        """From now on."""
        import httpx

        for client in (httpx.Client, httpx.AsyncClient):
            send = client.send

            def counted(self: Any, *args: Any, _send: Any = send, **kwargs: Any) -> Any:
                cls.number += 1
                return _send(self, *args, **kwargs)

            client.send = counted  # type: ignore[method-assign]


def here(flow: Any) -> Any:
    """The flow with its tasks in threads of this process, whatever node they are for."""
    from prefect.task_runners import ThreadPoolTaskRunner

    import flows.save

    nodes = {f"node{number}": "" for number in range(MOST_NODES)}
    flows.save.list_living_nodes = lambda: nodes  # type: ignore[attr-defined]
    flows.save.pin_to_node = lambda name, alive=None: {}  # type: ignore[attr-defined]
    return flow.with_options(task_runner=ThreadPoolTaskRunner(max_workers=8))


async def asked_for(client: Any, key: str) -> Any:
    """The run that the trigger makes, once it is there; the looks do not count."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
    while True:
        found = await client.read_flow_runs(flow_run_filter=wanted)
        CALLS.number -= 1
        if found:
            return found[0]
        await asyncio.sleep(0.01)


async def _tasks_of(client: Any, run: Any) -> int:
    """Task runs of a flow run, once the server knows of all that were told to it."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    known, seen = -1, 0
    while known != seen:
        known, seen = seen, 0
        await asyncio.sleep(2.0)
        while page := await client.read_task_runs(flow_run_filter=wanted, limit=200, offset=seen):
            seen += len(page)
    return seen


def _catalog(root: Path, step: int, settings: Any) -> tuple[int, float]:
    """Rows of a step in the catalog, and what it takes to write them again."""
    import sqlalchemy as sa

    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import mirror
    from trinity_sync.catalog.models import Step

    with open_catalog(get_catalog_url(settings)) as engine:
        began = time.perf_counter()
        mirror(engine, root, [step])
        took = time.perf_counter() - began
        with engine.connect() as connection:
            mine = Step.step == step, Step.job == root_job(root)
            rows = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar() or 0
    return rows, round(took * 1000, 1)


def root_job(root: Path) -> str:
    """By which the catalog knows the job."""
    from trinity_sync.layout import job_id

    return job_id(root)


@contextmanager
def prefect_server() -> Iterator[int]:
    """A Prefect server with the deployments; its pid."""
    from trinity_sync.orchestration.deploy import deploy
    from trinity_sync.settings import ServerSettings, Settings, StackSettings
    from trinity_sync.stack import daemon, services

    settings = Settings()
    stack = StackSettings(server=ServerSettings(port=0, password="none"))
    settings.home.mkdir(parents=True, exist_ok=True)
    state = services.start_server(settings, stack, services.StackState())
    assert state.server
    try:
        daemon.await_ready(
            "the Prefect server",
            state.server,
            lambda: services.is_server_ready(state),
            daemon.StartupDeadline(180),
        )
        os.environ["PREFECT_API_URL"] = state.api_url
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        deploy(stack, state.api_url)
        CALLS.count()
        yield state.server.pid
    finally:
        daemon.stop(state.server, 20)


def _nothing() -> Cost:
    return Cost(0, 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0.0)


def _row(values: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"


if __name__ == "__main__":
    main()
