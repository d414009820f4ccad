"""The questions that our own code, the UI and commands ask a Prefect server and the catalog."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from benchmarks.scale import asked_for, here
from benchmarks.simulated import Job
from trinity_sync.client.prefect_api import UNDER_WAY, PrefectApi
from trinity_sync.orchestration.quantities import RETENTION, make_artifact_key
from trinity_sync.orchestration.recovery.flow_runs import end_unreported_tasks
from trinity_sync.orchestration.recovery.reconcile import read_unfinished_saves, reconcile
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import job_id

ENDED = {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Questions:
    """Questions as functions without arguments, by name; and a save.

    The job at ``root`` is created or continued, with saves from ``first_step`` on.
    """

    def __init__(self, root: Path, first_step: int) -> None:
        self._settings, self._root, self._step = Settings(), root, first_step
        self._loop = asyncio.new_event_loop()
        self._job = Job(root, self._settings.spool / "simulated", 1, 1)
        self._client = self._run(get_client().__aenter__())
        self._api = PrefectApi(self._settings)
        self._sync = get_client(sync_client=True).__enter__()
        self._ui = httpx.Client(timeout=120)
        self._deployment = self._sync.read_deployment_by_name(SAVE_DEPLOYMENT).id
        self._last: Any = None
        self.by_name: dict[str, Callable[[], Any]] = {
            **self._ours(),
            **{name: lambda ask=ask: self._post(*ask) for name, ask in UI.items()},  # type: ignore[misc]
            **{name: lambda words=words: self._command(*words) for name, words in COMMANDS.items()},  # type: ignore[misc]
        }

    def save(self) -> float:
        """Stage, trigger and run one save here; return the seconds from the trigger on."""
        return float(self._run(self._saved()))

    async def _saved(self) -> float:
        from flows.save import save_step
        from trinity_sync.orchestration.prefect_compat import run_flow
        from trinity_sync.storage.manifest import read_manifest

        request = self._last = self._job.stage(self._step)
        self._step += 1
        began = time.perf_counter()
        await self._api.create_flow_run(request.flow_run)
        run = await asked_for(self._client, request.key)
        await run_flow(here(save_step), flow_run=run, return_type="state")
        took = time.perf_counter() - began
        assert read_manifest(self._root, request.step), f"{request.run_name} is not committed"
        return took

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def _ours(self) -> dict[str, Callable[[], Any]]:
        settings, pool = self._settings, StackSettings().worker.pool
        asked = self._sync.create_flow_run_from_deployment
        due = self._client.get_scheduled_flow_runs_for_work_pool
        api, job = self._api, job_id(self._root)
        return {
            OURS[0]: lambda: asked(self._deployment, **self._last.flow_run),
            OURS[1]: lambda: self._run(due(pool, scheduled_before=datetime.now(UTC))),
            OURS[2]: lambda: self._run(api.read_pool_runs(pool, *UNDER_WAY)),
            OURS[3]: lambda: self._run(end_unreported_tasks(api, pool)),
            OURS[4]: lambda: self._run(api.count_waiting_runs(pool)),
            OURS[5]: lambda: self._run(api.read_job_runs(job)),
            OURS[6]: lambda: self._run(api.read_table(make_artifact_key(RETENTION, self._root))),
            OURS[7]: lambda: reconcile(
                settings, [self._root], self._run(read_unfinished_saves(api))
            ),
        }

    def _post(self, path: str, body: dict[str, Any]) -> None:
        now = datetime.now(UTC)
        filled = _filled(body, now, str(self._newest_run()) if "logs" in path else "")
        self._ui.post(f"{PREFECT_API_URL.value()}{path}", json=filled).raise_for_status()

    def _newest_run(self) -> Any:
        return self._run(asked_for(self._client, self._last.key)).id

    def _command(self, *words: str) -> None:
        from typer.testing import CliRunner

        from trinity_sync.cli.commands import app

        names = {"ROOT": str(self._root), "STEP": str(self._last.step if self._last else 1)}
        names["PAGE"] = str(self._root.parent / "report.html")
        result = CliRunner().invoke(app, [names.get(word, word) for word in words])
        if result.exit_code:
            raise RuntimeError(f"{' '.join(words)}: {result.output[-500:]} {result.exception!r}")


OURS = (
    "trigger: a run that was asked for already",
    "worker: runs that are due, at each wake-up",
    "worker: runs under way, at each poll",
    "worker: unheard tasks, at each poll",
    "status: runs that wait",
    "report: runs of the job",
    "report: retention's table",
    "reconcile, every hour",
)
UI: dict[str, tuple[str, dict[str, Any]]] = {
    "UI runs: a page of 10": ("/flow_runs/paginate", {"sort": "START_TIME_DESC", "limit": 10}),
    "UI runs: chart of a week": (
        "/ui/flow_runs/history",
        {
            "flow_runs": {"expected_start_time": {"after_": -7 * DAY}},
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1000,
        },
    ),
    "UI runs: filter by a job's tag": (
        "/flow_runs/filter",
        {"flow_runs": {"tags": {"all_": ["kind:checkpoint"]}}, "sort": "START_TIME_DESC"},
    ),
    "UI runs: count of all that ended": ("/flow_runs/count", {"flow_runs": {"state": ENDED}}),
    "UI dashboard: history of a day": (
        "/flow_runs/history",
        {"history_start": -DAY, "history_end": HOUR, "history_interval_seconds": 3600},
    ),
    "UI dashboard: history of 30 days": (
        "/flow_runs/history",
        {"history_start": -30 * DAY, "history_end": HOUR, "history_interval_seconds": 86400},
    ),
    "UI dashboard: lateness": (
        "/flow_runs/lateness",
        {"flow_runs": {"expected_start_time": {"after_": -DAY}}},
    ),
    "UI dashboard: task runs of a day": (
        "/ui/task_runs/dashboard/counts",
        {"task_runs": {"start_time": {"after_": -DAY}}},
    ),
    "UI tasks: a page of 10": ("/task_runs/paginate", {"limit": 10}),
    "UI run: its logs": ("/logs/filter", {"logs": {"flow_run_id": {"any_": ["RUN"]}}}),
    "UI artifacts: newest of each": ("/artifacts/latest/filter", {"limit": 50}),
    "UI events: feed of a day": (
        "/events/filter",
        {"filter": {"occurred": {"since": -DAY, "until": HOUR}}, "limit": 50},
    ),
    "UI events: chart of a day": (
        "/events/count-by/time",
        {
            "filter": {"occurred": {"since": -DAY, "until": HOUR}},
            "time_unit": "hour",
            "time_interval": 1,
        },
    ),
}
"""Paths and bodies; a span is relative to now, RUN is the newest flow run."""
COMMANDS = {
    "trinity-sync ls": ("ls", "ROOT"),
    "trinity-sync show": ("show", "ROOT", "STEP"),
    "trinity-sync jobs ls": ("jobs", "ls"),
    "trinity-sync report": ("report", "ROOT", "--html", "PAGE"),
    "trinity-sync reconcile": ("reconcile", "ROOT"),
}
NAMES = (*OURS, *UI, *(name for name in COMMANDS if name != "trinity-sync reconcile"))
"""Questions that are asked in turn."""


def _filled(value: Any, now: datetime, run: str) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, now, run) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, now, run) for each in value]
    if isinstance(value, timedelta):
        return (now + value).isoformat()
    return run if value == "RUN" else value
