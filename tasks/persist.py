"""The parallel tasks of a save: one a component and node, on the node that holds the images."""

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from trinity_sync.layout import Component
from trinity_sync.orchestration.roots import require_allowed
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import known_job_spool
from trinity_sync.storage.persist import Save, WriteOptions, Written, persist

TASK_NAMES: dict[Component, str] = {
    "model": "model",
    "optim": "optimizer",
    "extra_state": "extras",
    "metadata": "metadata",
    "attachments": "attachments",
}


def save_of(request: SaveRequest) -> Save:
    """The request as files know it.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(Settings(), request.root)
    return Save(
        request.root, request.run, request.step, request.kind, request.roles, request.run_key
    )


def persist_component(request: SaveRequest, component: Component, spool: str) -> list[Written]:
    """Write a node's images of one component under temporary names, durably."""
    settings = Settings()
    options = WriteOptions(
        direct=settings.direct_io,
        bytes_per_s=settings.write_mb_per_s * 1e6,
        gather_s=settings.gather_s,
        writers=settings.writers,
        nice=settings.nice,
    )
    save = save_of(request)
    return persist(known_job_spool(spool, save.root), save, component, options)


async def is_io_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the disk failed, which may pass; what is missing, damaged or abandoned stays so."""
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error.__cause__ or error, OSError)
    return False


PERSIST: dict[Component, Task[[SaveRequest, Component, str], list[Written]]] = {
    component: Task(
        persist_component,
        name=name,
        description=f"Write the {name} images of one node",
        retries=3,
        retry_delay_seconds=[1, 5, 15],
        retry_condition_fn=is_io_error,
        persist_result=False,
    )
    for component, name in TASK_NAMES.items()
}
