"""The main program of a warm worker: join the Ray cluster once, then run flows until stopped.

With ``--deploy``, it first applies the deployments: it has imported what that takes seconds to.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import anyio
from prefect.settings import (
    PREFECT_WORKER_HEARTBEAT_SECONDS,
    PREFECT_WORKER_QUERY_SECONDS,
    temporary_settings,
)

from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.prefect_connection import refuse_other_users
from trinity_sync.errors import PrefectApiError, StackError, TrinitySyncError
from trinity_sync.orchestration.deploy import deploy
from trinity_sync.orchestration.metrics import METRICS
from trinity_sync.orchestration.package_paths import PACKAGES, TASK_PROCESSES
from trinity_sync.orchestration.worker import POLL_S, TrinitySyncWorker, load_flow
from trinity_sync.settings import Settings, StackSettings, read_settings

logger = logging.getLogger(__name__)


def serve(settings: Settings, stack: StackSettings, *, deploys: bool) -> None:
    """Join the Ray cluster of the settings and run flows until SIGTERM or Ctrl-C.

    Raises:
        StackError: The cluster cannot be joined, its workers cannot import the tasks or have too
            little memory, metrics cannot be served, or deploying fails.
    """
    import ray

    with suppress(PrefectApiError):  # a profile of Prefect's may name a server
        refuse_other_users(PrefectApi(settings).find_server())
    if not stack.ray.address:
        raise StackError("ray.address is not set. Start: trinity-sync worker")
    if stack.worker.metrics:
        METRICS.serve(settings, stack)
    load_flow("flows.save.save_step")  # the first save must not wait for imports
    if deploys:
        deploy(stack)
    started_in = Path.cwd()
    os.chdir(PACKAGES)  # this folder comes first on sys.path of the driver's Ray processes
    address = stack.ray.address
    runtime_env = {"py_executable": stack.ray.python} if stack.ray.python else None
    try:
        ray.init(address=address, namespace="prefect", log_to_driver=False, runtime_env=runtime_env)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())  # Ray names both versions, on several lines
        raise StackError(
            f"cannot join the Ray cluster at {address}: {why}. Start it, "
            "or correct ray.address; its versions of Ray and Python must equal those of this worker"
        ) from error
    os.chdir(started_in)
    try:
        try:
            # a process that Ray has ended for want of memory would be started again without end
            importing = ray.remote(num_cpus=0, max_retries=0)(_import_work)
            ray.get([importing.remote() for _ in range(TASK_PROCESSES)])
        except ray.exceptions.OutOfMemoryError as error:
            raise StackError(
                f"Ray ends its processes as they start: {str(error).strip().splitlines()[0]} Free "
                "memory on this node, or raise the threshold: RAY_memory_usage_threshold=0.99 "
                "trinity-sync restart"
            ) from error
        except ray.exceptions.RayError as error:
            raise StackError(
                f"the workers of the Ray cluster at {address} cannot import the stack's tasks: "
                f"{str(error).strip().splitlines()[-1]}. Set ray.python to the path "
                "of the stack's Python on its nodes"
            ) from error
        asyncio.run(_until_stopped(settings, stack))
    finally:
        ray.shutdown()


def _import_work() -> None:
    """Import what tasks do in a Ray worker process, so that the first save finds it imported."""
    importlib.import_module("trinity_sync.orchestration.on_node")


async def _until_stopped(settings: Settings, stack: StackSettings) -> None:
    await _require_access(settings)
    pace = {PREFECT_WORKER_QUERY_SECONDS: POLL_S, PREFECT_WORKER_HEARTBEAT_SECONDS: 10}
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, scope.cancel)
        with temporary_settings(pace):
            await TrinitySyncWorker(work_pool_name=stack.worker.pool).start()


async def _require_access(settings: Settings) -> None:
    """Check that the server accepts this worker's credentials; it may also be away for now.

    Raises:
        PrefectApiError: The server refuses them.
    """
    try:
        async with PrefectApi(settings) as api:
            await api.read_version()
    except PrefectApiError as error:
        if error.status in (401, 403):
            raise
        logger.debug("cannot check access to the server yet: %r", error)


if __name__ == "__main__":
    try:
        serve(*read_settings(), deploys="--deploy" in sys.argv)
    except TrinitySyncError as error:
        sys.exit(f"error: {error}")
