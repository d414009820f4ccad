"""The costs of one save, from 8 ranks on 1 node to 4,096 ranks on 512 nodes.

::

    python -m benchmarks.scale [RANKSxNODES ...]

Real are the Prefect server, the flow, its tasks and their bodies, files and catalog, and the ranks'
coordinators: all of them save, in turn, in a few processes (`rank_process`), and that of rank 0
requests and follows the flow run. Simulated are the nodes: each has a spool of its own, but the
work of Ray runs in threads of this process, because 512 Ray nodes do not fit on one machine. So the
figures do not include what Ray (a process a task) and a network add.

One save of each size counts, after one of a single rank that does not. No cost of a save may grow
faster than the nodes, no cost of a rank at all, and API calls not with ranks. The largest size is
compared with `TARGETS`, and what `reckon` makes of the two largest is printed.
"""

import asyncio
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SIZES = ((8, 1), (64, 8), (512, 64), (4096, 512))
MOST_NODES = 512
SLACK = 1.5
"""Factor by which a cost a node, or of a rank, may be larger with more nodes."""
TARGETS = {
    "task_runs": 20,
    "api_calls": 60,
    "parameter_bytes": 300,
    "catalog_rows": 1,
    "database_rows": 1000,
    "database_kb": 2000,
    "server_cpu_s": 5.0,
    "worker_cpu_s": 60.0,
    "rank_cpu_ms": 30.0,
    "trigger_to_commit_s": 120.0,
}
"""Largest costs of a save of 4,096 ranks on 512 nodes, on two cores."""
RECKONED_NODES, RECKONED_CORES, RECKONED_EVERY_S = 10_000, 8, 600


@dataclass(frozen=True)
class Cost:
    """Costs of one save."""

    ranks: int
    nodes: int
    task_runs: int
    api_calls: int
    """HTTP requests of flow and tasks; task states go over one websocket besides."""
    rank_0_calls: int
    """HTTP requests of rank 0, which asks again while the save lasts."""
    parameter_bytes: int
    trigger_to_commit_s: float
    trigger_to_end_s: float
    """Seconds to the end of the flow run, after the commit: other nodes' slots are freed."""
    server_cpu_s: float
    """Includes that of an idle server, some hundredths of a core."""
    worker_cpu_s: float
    """CPU seconds of flow and tasks, those of all nodes included."""
    rank_cpu_ms: float
    """CPU time of `save` and `wait_all` on a rank other than 0."""
    rank_0_cpu_s: float
    """CPU seconds from rank 0's `save` to the end of its `wait_all`."""
    database_rows: int
    database_kb: int
    catalog_rows: int
    catalog_cpu_ms: float


A_NODE = (
    "task_runs",
    "api_calls",
    "parameter_bytes",
    "trigger_to_commit_s",
    "trigger_to_end_s",
    "server_cpu_s",
    "worker_cpu_s",
    "database_rows",
    "database_kb",
    "catalog_rows",
    "catalog_cpu_ms",
)
"""Costs that may grow with the nodes."""
A_RANK = ("rank_cpu_ms",)
"""Costs of one rank, which may not grow."""


def main() -> None:
    sizes = [(int(a), int(b)) for a, b in (each.split("x") for each in sys.argv[1:])] or SIZES
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
        costs = []
        with prefect_server() as server:
            print(_row([name.replace("_", " ") for name in Cost.__annotations__]))
            for number, (ranks, nodes) in enumerate([(1, 1), *sizes]):
                root = Path(folder) / f"job{number}"
                cost = asyncio.run(save(root, Path(memory) / f"{number}", ranks, nodes, server))
                if number:
                    costs.append(cost)
                    print(_row(list(asdict(cost).values())), flush=True)
                    written = json.dumps([asdict(each) for each in costs], indent=1)
                    (RESULTS / "scale.json").write_text(written + "\n")
    found = judged(costs)
    print("\n".join(found) or "nothing grows faster than the nodes; nothing of a rank grows")
    if (costs[-1].ranks, costs[-1].nodes) == SIZES[-1]:
        print("\n".join(missed(costs[-1])) or "all targets are met")
        if len(costs) > 1:
            print(reckon(costs[-2], costs[-1]))
    sys.exit(bool(found))


def judged(costs: Sequence[Cost]) -> list[str]:
    """Return the costs that grow faster than they may."""
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
                for name in (*A_NODE, *A_RANK):
                    a, b = getattr(small, name), getattr(large, name)
                    if b > SLACK * (times if name in A_NODE else 1) * a:
                        faster = "faster than the nodes" if name in A_NODE else "with the ranks"
                        wrong.append(
                            f"{name} grows {faster}: {a} at {small.nodes}, {b} at {large.nodes}"
                        )
    return wrong


def missed(cost: Cost) -> list[str]:
    """Return the targets that a save of the largest size misses."""
    found = ((name, most, getattr(cost, name)) for name, most in TARGETS.items())
    return [
        f"target missed: {name} is {is_}, at most {most}" for name, most, is_ in found if is_ > most
    ]


def reckon(small: Cost, large: Cost) -> str:
    """Extrapolate a save's costs to `RECKONED_NODES`, by the line through two measured sizes."""

    def at(name: str) -> float:
        a, b = getattr(small, name), getattr(large, name)
        slope = (b - a) / (large.nodes - small.nodes)
        return float(b + slope * (RECKONED_NODES - large.nodes))

    available = RECKONED_CORES * RECKONED_EVERY_S
    share = 100 * at("server_cpu_s") / available
    return (
        f"reckoned for {RECKONED_NODES:,} nodes: {at('task_runs'):,.0f} task runs, "
        f"{at('api_calls'):,.0f} API calls, {at('server_cpu_s'):,.1f} CPU seconds of the server "
        f"({share:.1f}% of {RECKONED_CORES} cores at a save every {RECKONED_EVERY_S // 60} "
        f"minutes), {at('worker_cpu_s'):,.0f} of the worker and all tasks, "
        f"{at('database_kb') / 1000:,.1f} MB of the server's database"
    )


async def save(root: Path, memory: Path, ranks: int, nodes: int, server: int) -> Cost:
    """Save on all ranks and run the flow here; return the costs."""
    from prefect import get_client

    from benchmarks.rank_process import RankProcesses
    from benchmarks.resources import cpu_seconds
    from flows.save import save_step
    from trinity_sync.orchestration.prefect_compat import run_flow
    from trinity_sync.settings import Settings
    from trinity_sync.storage.manifest import read_manifest

    memory.mkdir(mode=0o700)
    job = RankProcesses(root, memory, ranks, nodes)
    step = 1
    async with get_client() as client:
        flow = here(save_step)
        database = _measure_database()
        server_cpu, began = cpu_seconds([server]), time.process_time()
        saved = job.save(step)
        request, triggered_at = saved["request"], saved["triggered_at"]
        run = await asked_for(client, request.key)
        calls = CALLS.number
        await run_flow(flow, flow_run=run, return_type="state")
        calls, ended_at = CALLS.number - calls, time.time()
        worker_cpu_s = time.process_time() - began
        waited = job.wait()
        manifest = read_manifest(root, step)
        assert manifest, f"{request.run_name} of {ranks} ranks is not committed"
        tasks = await _tasks_of(client, run.id)
    job.close()
    rows, nbytes = _measure_database()
    catalog_rows, catalog_cpu_ms = _catalog(root, step, Settings())
    return Cost(
        ranks=ranks,
        nodes=nodes,
        task_runs=tasks,
        api_calls=calls,
        rank_0_calls=waited["calls"],
        parameter_bytes=len(json.dumps(request.flow_run["parameters"])),
        trigger_to_commit_s=round(manifest.committed_at - triggered_at, 2),
        trigger_to_end_s=round(ended_at - triggered_at, 2),
        server_cpu_s=round(cpu_seconds([server]) - server_cpu, 2),
        worker_cpu_s=round(worker_cpu_s, 2),
        rank_cpu_ms=round(1000 * (saved["cpu_s"] + waited["cpu_s"]), 1),
        rank_0_cpu_s=round(waited["rank_0_cpu_s"], 2),
        database_rows=rows - database[0],
        database_kb=round((nbytes - database[1]) / 1000),
        catalog_rows=catalog_rows,
        catalog_cpu_ms=catalog_cpu_ms,
    )


def _measure_database() -> tuple[int, int]:
    """Return the rows of the server's database, and its bytes in use."""
    (file,) = Path(os.environ["TRINITY_SYNC_HOME"]).rglob("prefect.db")
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        ask = lambda query: connection.execute(query).fetchone()[0]  # noqa: E731
        named = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables = [name for (name,) in connection.execute(named)]
        rows = sum(ask(f'SELECT count(*) FROM "{table}"') for table in tables)
        pages = ask("PRAGMA page_count") - ask("PRAGMA freelist_count")
        return rows, pages * ask("PRAGMA page_size")


class CALLS:
    """HTTP requests of this process, counted where httpx sends them."""

    number = 0

    @classmethod
    def count(cls) -> None:
        """Begin to count."""
        import httpx

        for client in (httpx.Client, httpx.AsyncClient):
            send = client.send

            def counted(self: Any, *args: Any, _send: Any = send, **kwargs: Any) -> Any:
                cls.number += 1
                return _send(self, *args, **kwargs)

            client.send = counted  # type: ignore[method-assign]


class _NoRay:
    """Ray's part in ``tasks.on_ray``, with threads of this process for nodes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(8, "node")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Alive": True,
                "NodeManagerHostname": f"node{number}",
                "NodeName": f"node{number}",
                "NodeID": f"{number:056x}",
            }
            for number in range(MOST_NODES)
        ]

    def remote(self, **_: object) -> "Callable[[Callable[..., Any]], _Remote]":
        """Return a decorator of a function, which is then run in a thread."""
        return partial(_Remote, self._threads)


class _Remote:
    def __init__(self, threads: ThreadPoolExecutor, function: Callable[..., Any]) -> None:
        self._threads, self._function = threads, function

    def options(self, **_: object) -> "_Remote":
        return self

    def remote(self, *arguments: Any) -> Any:
        return asyncio.wrap_future(self._threads.submit(self._function, *arguments))


def here(flow: Any) -> Any:
    """Return the flow with threads of this process for nodes, whatever node its work is for."""
    import tasks.on_ray

    tasks.on_ray.ray = _NoRay()  # type: ignore[attr-defined]
    tasks.on_ray._get_remote_call.cache_clear()
    return flow


async def asked_for(client: Any, key: str) -> Any:
    """Return the run that the trigger creates, once it exists; polling is not counted."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
    while True:
        found = await client.read_flow_runs(flow_run_filter=wanted)
        CALLS.number -= 1
        if found:
            return found[0]
        await asyncio.sleep(0.01)


async def _tasks_of(client: Any, run: Any) -> int:
    """Return the number of task runs of a flow run, once the server has stored all of them."""
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
    """Return a step's rows in the catalog, and the CPU milliseconds to write them again."""
    import sqlalchemy as sa

    from trinity_sync.catalog import Step, get_catalog_url, mirror, open_catalog

    with open_catalog(get_catalog_url(settings)) as engine:
        began = time.process_time()
        mirror(engine, root, [step])
        took = time.process_time() - began
        with engine.connect() as connection:
            mine = Step.step == step, Step.job == root_job(root)
            rows = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar() or 0
    return rows, round(took * 1000, 1)


def root_job(root: Path) -> str:
    """Return the job's identifier in the catalog."""
    from trinity_sync.snapshot.identity import job_id

    return job_id(root)


@contextmanager
def prefect_server() -> Iterator[int]:
    """Run a Prefect server with the deployments; yield its pid."""
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
            time.monotonic() + 180,
        )
        os.environ["PREFECT_API_URL"] = state.api_url
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        deploy(stack, state.api_url)
        CALLS.count()
        yield state.server.pid
    finally:
        daemon.stop(state.server, 20)


def _row(values: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"


if __name__ == "__main__":
    main()
