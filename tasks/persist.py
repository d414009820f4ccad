"""The parallel tasks of a save: one a component and node, on the node that holds the images."""

from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.layout import Component
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.settings import Settings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.receipts import await_receipts, sync_function_files
from trinity_sync.storage.save import Persisted

TASK_NAMES: dict[Component | None, str] = {
    "model": "model",
    "optim": "optimizer",
    "extra_state": "extras",
    "metadata": "metadata",
    "attachments": "attachments",
    None: "functions",
}


def make_save(request: SaveRequest) -> SaveId:
    """Return the save of a request, once this node's settings allow flows to work on its root.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(Settings(), request.root)
    return request.save


def persist_component(
    request: SaveRequest, component: Component | None, share: NodeShards, functions: bool = False
) -> Persisted:
    """Write a node's images of one component under temporary names, durably.

    Args:
        request: of the save.
        component: None where all that the step saves comes from functions.
        share: what the node holds.
        functions: wait for the save functions of the node, too, and sync what they wrote.
    """
    settings, save = Settings(), make_save(request)
    options = WriteOptions(
        direct=settings.direct_io,
        bytes_per_s=settings.write_mb_per_s * 1e6,
        gather_s=settings.gather_s,
        writers=settings.writers,
        nice=settings.nice,
    )
    spool = get_job_spool(share.spool, save.root)
    written = persist(share, save, component, options) if component else []
    receipts = await_receipts(spool, save) if functions else []
    sync_function_files(save, receipts)
    return Persisted(written, receipts)


async def is_io_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the disk failed, which may pass; what is missing, corrupted or abandoned stays so."""
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error.__cause__ or error, OSError)
    return False


PERSIST: dict[
    Component | None, Task[[SaveRequest, Component | None, NodeShards, bool], Persisted]
] = {
    component: Task(
        persist_component,
        name=name,
        description=f"{'Write' if component else 'Wait for'} the {name} of one node",
        retries=3,
        retry_delay_seconds=[1, 5, 15],
        retry_condition_fn=is_io_error,
        persist_result=False,
    )
    for component, name in TASK_NAMES.items()
}
