"""Work pool and deployments on a Prefect server, as ``prefect.yaml`` lists them.

``prefect deploy`` needs a checkout to run in and a work pool that exists; this needs the installed
package only. Applying twice changes nothing, and leaves alone what prefect.yaml does not mention,
such as a concurrency limit set in the Prefect UI.
"""

from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema

from trinity_sync.errors import StackError
from trinity_sync.orchestration.server import server_client
from trinity_sync.orchestration.warm import PACKAGES, load_flow
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.settings import Settings


def deploy(settings: Settings, api_url: str | None = None) -> list[str]:
    """Make the work pool if it is missing, and register every deployment of prefect.yaml.

    Args:
        settings: its ``work_pool`` is the pool that all deployments go to.
        api_url: the server; ``PREFECT_API_URL`` or the Prefect profile by default.

    Returns:
        Names of the deployments, as ``flow/deployment``.

    Raises:
        StackError: the server cannot be reached, refuses, or has such a pool of another type.
        ConfigError: an entrypoint cannot be imported.
    """
    with server_client(api_url) as client:
        _ensure_pool(client, settings.work_pool)
        return [_apply(client, entry, settings.work_pool) for entry in deployments()]


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


def _apply(client: SyncPrefectClient, entry: dict[str, Any], pool: str) -> str:
    flow = load_flow(entry["entrypoint"])
    name = f"{flow.name}/{entry['name']}"
    said: dict[str, Any] = {
        "entrypoint": entry["entrypoint"],
        "description": entry.get("description"),
        "tags": entry.get("tags", []),
        "work_pool_name": pool,
        "pull_steps": [],
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
    }
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        client.create_deployment(client.create_flow(flow), entry["name"], **said)
    else:
        client.update_deployment(existing.id, DeploymentUpdate(**said))
    return name
