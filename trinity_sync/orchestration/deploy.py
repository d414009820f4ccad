"""Create or update the work pool, deployments and automations on a Prefect server.

``prefect.yaml`` lists the deployments. Unlike ``prefect deploy``, this needs neither a checkout nor
an existing work pool. It is idempotent, and changes neither what prefect.yaml does not mention,
such as a concurrency limit set in the Prefect UI, nor existing schedules, which a user may have
paused or moved.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from trinity_sync.client.save_request import QUEUES
from trinity_sync.errors import StackError
from trinity_sync.orchestration.automations import create_alerts, register_heartbeat_monitoring
from trinity_sync.orchestration.flow_loader import load_flow
from trinity_sync.orchestration.pipeline import PACKAGES
from trinity_sync.orchestration.prefect_compat import parameter_schema
from trinity_sync.orchestration.prefect_queries import open_client
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.settings import StackSettings

RECONCILE = "reconcile/reconcile"
PRIORITIES = (QUEUES["state_dict"], QUEUES["checkpoint"], "maintenance")
"""Work queues of the pool, highest priority first."""


def deploy(stack: StackSettings, api_url: str | None = None) -> list[str]:
    """Register the work pool, its queues, the deployments of prefect.yaml and the automations.

    Args:
        stack: The work pool of all deployments, whether new schedules are active, and the time
            without a heartbeat after which a run is crashed.
        api_url: The server; by default ``PREFECT_API_URL`` or that of the Prefect profile.

    Returns:
        Names of the deployments, as ``flow/deployment``.

    Raises:
        StackError: The server cannot be reached, refuses a call, or has a pool of the same name and
            another type.
        ConfigError: An entrypoint cannot be imported.
    """
    with open_client(api_url) as client:
        _ensure_pool(client, stack.worker.pool)
        _ensure_queues(client, stack.worker.pool)
        ids = dict(_apply_deployment(client, entry, stack) for entry in read_deployments())
        monitored = [ids[name] for name in ids if name != RECONCILE]
        silent_s = stack.worker.heartbeat_timeout.total_seconds()
        register_heartbeat_monitoring(client, monitored, ids[RECONCILE], silent_s=silent_s)
        create_alerts(client)
        return list(ids)


def read_deployments() -> list[dict[str, Any]]:
    """Return the entries of prefect.yaml."""
    text = Path(PACKAGES, "flows", "prefect.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.safe_load(text)["deployments"]
    return entries


def _ensure_pool(client: SyncPrefectClient, name: str) -> None:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        template = TrinitySyncWorker.get_default_base_job_template()
        create = WorkPoolCreate(name=name, type=TrinitySyncWorker.type, base_job_template=template)
        try:
            pool = client.create_work_pool(create)
        except ObjectAlreadyExists:  # by a concurrent deploy
            pool = client.read_work_pool(name)
    if pool.type != TrinitySyncWorker.type:
        raise StackError(
            f"work pool {name!r} exists and is of type {pool.type!r}, not "
            f"{TrinitySyncWorker.type!r}. Remove it, or set worker.pool to another name."
        )


def _ensure_queues(client: SyncPrefectClient, pool: str) -> None:
    """Create the missing queues; existing ones keep their settings."""
    existing = {queue.name for queue in client.read_work_queues(work_pool_name=pool)}
    for priority, name in enumerate(PRIORITIES, start=1):
        if name not in existing:
            with suppress(ObjectAlreadyExists):  # by a concurrent deploy
                client.create_work_queue(name=name, priority=priority, work_pool_name=pool)


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
        slugs: set[str | None] = set()
    else:
        client.update_deployment(found.id, DeploymentUpdate(**fields))
        deployment, slugs = found.id, {schedule.slug for schedule in found.schedules}
    new = [each for each in entry.get("schedules", []) if each["slug"] not in slugs]
    if new:  # existing ones may have been changed or paused in the UI
        client.create_deployment_schedules(
            deployment, [_make_schedule(each, stack.maintenance.schedules) for each in new]
        )
    return name, deployment


def _make_schedule(entry: dict[str, Any], active: bool) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=CronSchedule(cron=entry["cron"], timezone=entry.get("timezone")),
        active=active and entry.get("active", True),
        slug=entry["slug"],
        parameters=entry.get("parameters", {}),
    )
