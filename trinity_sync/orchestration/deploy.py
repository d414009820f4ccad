"""Create or update the work pool, deployments and automations on a Prefect server.

``prefect.yaml`` lists the deployments. Unlike ``prefect deploy``, this needs neither a checkout nor
an existing work pool. It is idempotent, and does not change what prefect.yaml does not mention,
such as a concurrency limit set in the Prefect UI. A schedule that a user has paused or moved stays
so until its settings change.

The automation monitors heartbeats: it crashes flow runs that send none. `recovery.flow_runs`
recovers the runs of its own node only. If a node is lost, its runs would stay Running forever. The
Prefect server receives a heartbeat from every run, and the automation sets a run to Crashed if it
has sent none for too long. The server accepts a final state after a crash, but no crash after a
final state: a run that is still executed ends in the state that it reports.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.objects import DeploymentSchedule, StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from trinity_sync.client.prefect_connection import (
    ANSWER_S,
    bypass_proxies,
    find_server,
    translate_errors,
)
from trinity_sync.errors import StackError
from trinity_sync.orchestration.package_paths import read_deployments
from trinity_sync.orchestration.prefect_compat import parameter_schema
from trinity_sync.orchestration.worker import TrinitySyncWorker, load_flow
from trinity_sync.saves.save_request import QUEUES
from trinity_sync.settings import MaintenanceSettings, StackSettings, read_settings

ANCHOR = datetime(2020, 1, 1, tzinfo=UTC)
"""Time from which intervals are counted, so that they begin at full hours."""
PAUSED = ":paused"
"""End of the slug of a schedule that the settings pause."""
PRIORITIES = (QUEUES["state_dict"], QUEUES["checkpoint"], "maintenance")
"""Work queues of the pool, highest priority first."""


@contextmanager
def open_client(api_url: str | None = None) -> Iterator[SyncPrefectClient]:
    """Open Prefect's own client, which makes the server's objects; its errors are translated.

    The default server is that of ``PREFECT_API_URL``, or the local stack's.

    Raises:
        PrefectApiError: No server is known, it cannot be reached, or it refuses a call.
    """
    server = find_server(read_settings()[0].home, api_url)
    bypass_proxies(os.environ, *([server.url] if api_url or server.is_own else []))
    named: dict[Any, Any] = {PREFECT_API_URL: server.url}
    if server.login:
        named[PREFECT_API_AUTH_STRING] = server.login
    with (
        translate_errors(server, ANSWER_S),
        temporary_settings(named),
        get_client(sync_client=True) as client,
    ):
        yield client


def deploy(stack: StackSettings, api_url: str | None = None) -> list[str]:
    """Register the work pool, its queues, the deployments of prefect.yaml and the automation.

    Return the deployments, as ``flow/deployment``. The default server is as of `open_client`.

    Raises:
        StackError: The server cannot be reached, refuses a call, or has a pool of the same name and
            another type.
        ConfigError: An entrypoint cannot be imported.
    """
    with open_client(api_url) as client:
        _ensure_pool(client, stack.worker.pool)
        for priority, name in enumerate(PRIORITIES, start=1):
            with suppress(ObjectAlreadyExists):  # it keeps its settings
                client.create_work_queue(name, priority=priority, work_pool_name=stack.worker.pool)
        ids = dict(_apply_deployment(client, entry, stack) for entry in read_deployments())
        silent_s = stack.worker.heartbeat_timeout.total_seconds()
        register_heartbeat_monitoring(client, [*ids.values()], silent_s=silent_s)
        return list(ids)


def _ensure_pool(client: SyncPrefectClient, name: str) -> None:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        template = TrinitySyncWorker.get_default_base_job_template()
        create = WorkPoolCreate(name=name, type=TrinitySyncWorker.type, base_job_template=template)
        with suppress(ObjectAlreadyExists):  # by a concurrent deploy
            client.create_work_pool(create)
        pool = client.read_work_pool(name)
    if pool.type != TrinitySyncWorker.type:
        raise StackError(
            f"work pool {name!r} exists and is of type {pool.type!r}, not "
            f"{TrinitySyncWorker.type!r}. Remove it, or set worker.pool to another name."
        )


def _apply_deployment(
    client: SyncPrefectClient, entry: dict[str, Any], stack: StackSettings
) -> tuple[str, UUID]:
    """Create or update a deployment, and return its name and id."""
    flow = load_flow(entry["entrypoint"])
    name = f"{flow.name}/{entry['name']}"
    fields: dict[str, Any] = {
        "entrypoint": entry["entrypoint"],
        "description": entry.get("description"),
        "tags": entry.get("tags", []),
        "work_pool_name": stack.worker.pool,
        "work_queue_name": entry["work_pool"]["work_queue_name"],
        "pull_steps": [],
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
        **{name: entry[name] for name in ("parameters", "concurrency_limit") if name in entry},
    }
    try:
        found = client.read_deployment_by_name(name)
    except ObjectNotFound:
        deployment = client.create_deployment(client.create_flow(flow), entry["name"], **fields)
        existing: list[DeploymentSchedule] = []
    else:
        client.update_deployment(found.id, DeploymentUpdate(**fields))
        deployment, existing = found.id, found.schedules
    for each in entry.get("schedules", []):
        _apply_schedule(client, deployment, existing, make_schedule(each, stack.maintenance))
    return name, deployment


def _apply_schedule(
    client: SyncPrefectClient,
    deployment: UUID,
    existing: Sequence[DeploymentSchedule],
    wanted: DeploymentScheduleCreate,
) -> None:
    """Create a schedule in place of those of its name; leave it if it exists, alone.

    It may have been moved or paused in the UI. A pause outlives a change of the settings. Others of
    its name have other settings, or are those of ``prefect deploy``.
    """
    assert wanted.slug is not None
    name = wanted.slug.partition(":")[0]
    exists = any(schedule.slug == wanted.slug for schedule in existing)
    for schedule in existing:
        slug = schedule.slug or ""
        if slug.partition(":")[0] == name and slug != wanted.slug:
            client.delete_deployment_schedule(deployment, schedule.id)
            if not schedule.active and not slug.endswith(PAUSED):
                wanted = wanted.model_copy(update={"active": False})
    if not exists:
        client.create_deployment_schedules(deployment, [wanted])


def make_schedule(
    entry: dict[str, Any], maintenance: MaintenanceSettings
) -> DeploymentScheduleCreate:
    """Return a schedule of prefect.yaml as the settings want it.

    Its slug says what the settings want: with other settings, it is another schedule.
    """
    name, zone = entry["slug"], find_time_zone(maintenance)
    active, parameters = maintenance.schedules, entry.get("parameters", {})
    when: CronSchedule | IntervalSchedule = CronSchedule(cron=entry["cron"], timezone=zone)
    if name == "nightly":
        active = active and maintenance.verify > 0
        parameters = {"sample_percent": round(100 * maintenance.verify, 6)}
    elif name == "repair":
        when = IntervalSchedule(interval=maintenance.repair, anchor_date=ANCHOR, timezone=zone)
    text = json.dumps([when.model_dump(mode="json"), parameters], sort_keys=True)
    slug = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:8]}" + PAUSED * (not active)
    return DeploymentScheduleCreate(schedule=when, active=active, slug=slug, parameters=parameters)


def find_time_zone(maintenance: MaintenanceSettings) -> str:
    """Return the name of the time zone of the schedules: the settings', otherwise this host's."""
    names = [maintenance.timezone, os.environ.get("TZ", "").removeprefix(":")]
    with suppress(OSError):
        names.append(os.readlink("/etc/localtime").partition("zoneinfo/")[2])  # noqa: PTH115
    with suppress(OSError):
        names.append(Path("/etc/timezone").read_text().strip())
    for name in filter(None, names):
        with suppress(ValueError, OSError, ZoneInfoNotFoundError):
            return ZoneInfo(name).key
    return "UTC"


HEARTBEAT_AUTOMATION = "trinity-sync: crash runs without heartbeats"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDS = {f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled", "Crashed")}


def register_heartbeat_monitoring(
    client: SyncPrefectClient, watched: list[UUID], *, silent_s: float
) -> None:
    """Create the automation, or update the one that exists; a paused one stays paused.

    A run is crashed after ``silent_s`` without a heartbeat or a final state.
    """
    # an update sends only fields that were set, so types and other defaults are set explicitly
    trigger = EventTrigger(
        type="event",
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={
            "prefect.resource.role": "deployment",
            "prefect.resource.id": [f"prefect.deployment.{each}" for each in watched],
        },
        for_each={"prefect.resource.id"},
        after={HEARTBEAT},
        expect={HEARTBEAT, *ENDS},
        posture=Posture.Proactive,
        within=timedelta(seconds=silent_s),
    )
    crash = ChangeFlowRunState(
        type="change-flow-run-state",
        name=None,
        state=StateType.CRASHED,
        message=f"No heartbeat for {silent_s:g} s.",
        force=False,
    )
    found = client.read_automations_by_name(HEARTBEAT_AUTOMATION)
    wanted = AutomationCore(
        name=HEARTBEAT_AUTOMATION,
        description=f"Crashes runs that send no heartbeat for {silent_s:g} s. Created by "
        "trinity-sync deploy.",
        enabled=all(each.enabled for each in found),
        trigger=trigger,
        actions=[crash],
    )
    if not found:
        client.create_automation(wanted)
        return
    client.update_automation(found[0].id, wanted)
    for duplicate in found[1:]:  # created by two concurrent deploys
        client.delete_automation(duplicate.id)
