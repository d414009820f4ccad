"""Work pool, deployments and automations on a Prefect server; ``prefect.yaml`` lists deployments.

``prefect deploy`` needs a checkout to run in and a work pool that exists; this needs the installed
package only. Applying twice changes nothing, and leaves alone what prefect.yaml does not mention,
such as a concurrency limit set in the Prefect UI, and schedules that are there already, which may
have been paused or moved on purpose.
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
from trinity_sync.orchestration.automations import register_heartbeat_monitoring
from trinity_sync.orchestration.flow_loader import load_flow
from trinity_sync.orchestration.pipeline import PACKAGES
from trinity_sync.orchestration.prefect_compat import parameter_schema
from trinity_sync.orchestration.prefect_queries import open_client
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.settings import Settings

RECONCILE = "reconcile/reconcile"
PRIORITIES = (QUEUES["state_dict"], QUEUES["checkpoint"], "maintenance")
"""Work queues of the pool, the one first that a worker takes runs from first."""


def deploy(settings: Settings, api_url: str | None = None) -> list[str]:
    """Register the work pool, its queues, the deployments of prefect.yaml and the automations.

    Args:
        settings: its ``work_pool`` is the pool that all deployments go to; ``schedules`` says
            whether new schedules are active, ``silent_s`` after how many seconds without a
            heartbeat a run counts as crashed.
        api_url: the server; ``PREFECT_API_URL`` or the Prefect profile by default.

    Returns:
        Names of the deployments, as ``flow/deployment``.

    Raises:
        StackError: the server cannot be reached, refuses, or has such a pool of another type.
        ConfigError: an entrypoint cannot be imported.
    """
    with open_client(api_url) as client:
        _ensure_pool(client, settings.work_pool)
        _ensure_queues(client, settings.work_pool)
        made = dict(_apply(client, entry, settings) for entry in deployments())
        others = [made[name] for name in made if name != RECONCILE]
        register_heartbeat_monitoring(client, others, made[RECONCILE], silent_s=settings.silent_s)
        return list(made)


def deployments() -> list[dict[str, Any]]:
    """The deployments of prefect.yaml, as it spells them."""
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
        except ObjectAlreadyExists:  # by somebody else, just now
            pool = client.read_work_pool(name)
    if pool.type != TrinitySyncWorker.type:
        raise StackError(
            f"work pool {name!r} exists and is of type {pool.type!r}, not "
            f"{TrinitySyncWorker.type!r}. Remove it, or set TRINITY_SYNC_WORK_POOL to another name."
        )


def _ensure_queues(client: SyncPrefectClient, pool: str) -> None:
    """Make the queues that are missing; what was set by hand at one that is there stays."""
    have = {queue.name for queue in client.read_work_queues(work_pool_name=pool)}
    for priority, name in enumerate(PRIORITIES, start=1):
        if name not in have:
            with suppress(ObjectAlreadyExists):  # by somebody else, just now
                client.create_work_queue(name=name, priority=priority, work_pool_name=pool)


def _apply(
    client: SyncPrefectClient, entry: dict[str, Any], settings: Settings
) -> tuple[str, UUID]:
    """Name and id of the deployment."""
    flow = load_flow(entry["entrypoint"])
    name = f"{flow.name}/{entry['name']}"
    said: dict[str, Any] = {
        "entrypoint": entry["entrypoint"],
        "description": entry.get("description"),
        "tags": entry.get("tags", []),
        "work_pool_name": settings.work_pool,
        "work_queue_name": entry["work_pool"]["work_queue_name"],
        "pull_steps": [],
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
        **{name: entry[name] for name in ("parameters", "concurrency_limit") if name in entry},
    }
    try:
        found = client.read_deployment_by_name(name)
    except ObjectNotFound:
        deployment = client.create_deployment(client.create_flow(flow), entry["name"], **said)
        have: set[str | None] = set()
    else:
        client.update_deployment(found.id, DeploymentUpdate(**said))
        deployment, have = found.id, {schedule.slug for schedule in found.schedules}
    new = [each for each in entry.get("schedules", []) if each["slug"] not in have]
    if new:  # those that are there may have been changed or paused in the UI on purpose
        client.create_deployment_schedules(
            deployment, [_schedule(each, settings.schedules) for each in new]
        )
    return name, deployment


def _schedule(entry: dict[str, Any], active: bool) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=CronSchedule(cron=entry["cron"], timezone=entry.get("timezone")),
        active=active and entry.get("active", True),
        slug=entry["slug"],
        parameters=entry.get("parameters", {}),
    )
