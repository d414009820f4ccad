"""What holds a worker up, and what it says of its trouble, without a Prefect server."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import environment
from tests.unit.job import Job
from trinity_sync.orchestration.roots import note_root
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.settings import Settings
from trinity_sync.storage.iteration import read_iteration
from trinity_sync.storage.locks import one_change_at_a_time


@pytest.fixture(autouse=True)
def settings(job: Job, tmp_path: Path) -> Iterator[Settings]:
    named = {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SPOOL": str(job.spool.folder.parent),
    }
    from prefect.context import refresh_global_settings_context

    with environment(named):
        refresh_global_settings_context()
        yield Settings()
    refresh_global_settings_context()


def test_a_root_that_hangs_does_not_hold_up_a_workers_start(job: Job, settings: Settings) -> None:
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    job.commit(4)
    pointer = job.root / "latest_checkpointed_iteration.txt"
    pointer.unlink()
    note_root(settings, job.root)

    async def start_and_stop() -> None:
        async with TrinitySyncWorker(work_pool_name="any"):
            pass

    with one_change_at_a_time(job.root):  # so long a commit, or a file system that is gone
        asyncio.run(asyncio.wait_for(start_and_stop(), 60))
    for thread in threading.enumerate():
        if thread.name == "mend-roots":
            thread.join()
    assert read_iteration(job.root, "checkpoint") == 4


def test_a_spool_that_cannot_be_used_is_said_and_a_server_that_is_away_is_none(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.spool.chmod(0o755)

    def said() -> list[str]:
        return [each.message for each in caplog.records if "is tried again" in each.message]

    async def start_and_wait() -> None:
        async with TrinitySyncWorker(work_pool_name="any"):
            while not said():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(start_and_wait(), 60))
    (message,) = said()
    assert f"run: chmod 700 {settings.spool}" in message
