"""More due runs than a response of the server has, all but one of a job whose runs hang."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.states import Scheduled

from tests.integration.prefect_api import Api
from trinity_sync.client.prefect_api import PAGE
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.stack.services import StackState

POOL = "many-due-runs"


class Looking(TrinitySyncWorker):
    """A worker that looks at due runs and starts none."""

    type = "looking"

    def __init__(self, *, work_pool_name: str) -> None:
        super().__init__(work_pool_name=work_pool_name)
        self.seen: dict[UUID, str] = {}

    def select_runs(self, due: Sequence[WorkerFlowRunResponse]) -> list[WorkerFlowRunResponse]:
        self.seen |= {run.flow_run.id: run.flow_run.name for run in due}
        return []


def fill(client: SyncPrefectClient) -> None:
    client.create_work_pool(WorkPoolCreate(name=POOL, type="looking"))
    for queue in ("first", "second"):  # of a higher priority is what comes first
        client.create_work_queue(queue, work_pool_name=POOL)
    flow = client.create_flow_from_name("save-step")
    deployment = client.create_deployment(flow, POOL, work_pool_name=POOL)

    due = Scheduled()
    due.state_details.scheduled_time = None  # now, by the server's clock

    def add(queue: str, name: str) -> None:
        client.create_flow_run_from_deployment(
            deployment, state=due, work_queue_name=queue, name=name
        )

    for _ in range(PAGE + 10):
        add("first", "hangs")
    add("first", "last of the first")
    add("second", "of the second")


def test_a_worker_sees_the_due_runs_of_other_jobs(stack: StackState, api: Api) -> None:
    with api.client as client:
        fill(client)

    async def look() -> list[str]:
        async with Looking(work_pool_name=POOL) as worker, get_client() as asking:
            (page,) = [await asking.get_scheduled_flow_runs_for_work_pool(POOL)]
            assert {run.flow_run.name for run in page} == {"hangs"}
            worker._complete_at = 0.0
            while len(worker.seen) < PAGE + 12:
                await worker.get_and_submit_flow_runs()
                await asyncio.sleep(0.1)
            return [*worker.seen.values()]

    seen = asyncio.run(asyncio.wait_for(look(), 60))
    assert len(seen) == PAGE + 12
    assert {*seen} == {"hangs", "last of the first", "of the second"}
