"""Trinity's call that requests the flow run of a step, as a coroutine among others."""

import asyncio

import torch

from tests.unit.conftest import Open
from tests.unit.job import Job, held
from tests.unit.test_overlap import BIG


def test_other_coroutines_run_while_it_waits_for_staging(coordinator_of: Open, job: Job) -> None:
    saves = coordinator_of()
    model = {"w": torch.ones(BIG)}
    run = 0

    async def story() -> None:
        nonlocal run
        with held(saves._stager):
            saves.save(10, {"model": model}, overlap=True)
            requested = asyncio.create_task(saves.register_and_monitor(10))
            for _ in range(20):
                await asyncio.sleep(0.01)
                run += not requested.done()
            assert not job.spool.tickets()[0]
        await requested

    asyncio.run(story())
    assert run == 20
    assert len(job.spool.tickets()[0]) == 1
