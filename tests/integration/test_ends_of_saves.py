"""However a save ends on the stack, all ranks learn why, and none of them asks the server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling

from tests.faults.slow_save import find_part
from tests.integration.prefect_api import Api, key_of
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings, set_job_settings
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.orchestration.step_events import JOB_RESOURCE
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.stack.services import StackState
from trinity_sync.storage.manifest import read_manifest

Ranks = list[CheckpointCoordinator]


@pytest.fixture
def ranks(stack: StackState, stack_settings: Settings, root: Path) -> Iterator[Ranks]:
    """The ranks of a job, of which each has one coordinator."""
    made = [
        CheckpointCoordinator(root, rank=rank, world_size=2, run_key="one", settings=stack_settings)
        for rank in range(2)
    ]
    yield made
    for rank in made:
        rank.close()


def save(*ranks: CheckpointCoordinator) -> None:
    for rank in ranks:
        rank.save(2, {"model": {"w": torch.full((3,), 2.0)}})


def set_state(api: Api, root: Path, state: State) -> None:
    """Set the state of the save's flow run, as a user does in the UI."""
    run = until(lambda: api.runs_of(key_of(root, 2)), "the flow run")[0]
    api.set_states(run.id, state, force=False)


def assert_all_say(ranks: Ranks, why: str) -> None:
    for rank in reversed(ranks):
        with pytest.raises(SaveFailedError, match=rf"save actor step 2 of .* not committed: {why}"):
            rank.wait_all(250)


@pytest.fixture(autouse=True)
def trainers_read_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test whose trainers ask for flow runs."""
    for name in ("_filter_runs", "read_flow_run", "read_states"):
        monkeypatch.setattr(PrefectApi, name, lambda *_: pytest.fail("a trainer asks"))


def test_values_that_are_refused_fail_the_flow_run_and_those_that_are_not_are_an_event(
    ranks: Ranks, root: Path, api: Api
) -> None:
    wrong = [{"model": {"w": torch.tensor([1.0, float("nan")][: rank + 1])}} for rank in range(2)]
    set_job_settings(root, {"on_nonfinite": "refuse"})
    for rank, states in zip(ranks, wrong, strict=True):
        rank.save(2, states)
    found = r"1 non-finite value in actor/model of rank 1 \(w\)"
    assert_all_say(ranks, rf".*{found}")
    run = api.ended(api.run_of(key_of(root, 2)).id)  # which tells its failure before it ends
    assert run.state.type == "FAILED"
    assert re.search(found, str(run.state.message))
    set_job_settings(root, {"on_nonfinite": "warn"})
    for rank, states in zip(ranks, wrong, strict=True):
        rank.save(3, states)
    for rank in ranks:
        rank.wait_all(250)
    resource = JOB_RESOURCE + ranks[0].spool.folder.name
    until(lambda: api.events_of(resource).get("trinity_sync.step.unhealthy") == 3, "the event")


def test_a_save_that_cannot_be_written(ranks: Ranks, root: Path) -> None:
    (root / "global_step_2").write_text("so that nothing can be written")
    save(*ranks)
    assert_all_say(ranks, r"cannot write model of step 2.*trinity-sync runs .*/runs/flow-run/")


def test_a_save_that_is_cancelled_while_it_is_written(ranks: Ranks, root: Path, api: Api) -> None:
    save(ranks[0])
    run = until(lambda: api.runs_of(key_of(root, 2)), "the flow run")[0]
    # it waits for the other rank
    until(lambda: "persist" in "".join(task.name for task in api.tasks_of(run)), "its tasks")
    set_state(api, root, Cancelling())
    until(lambda: api.ended(run.id).state.name == "Cancelled", "the cancelled run")
    save(ranks[1])  # not before, or the save may be committed before it is cancelled
    assert_all_say(ranks, "Cancelled: Cancelled while running")
    assert read_manifest(root, 2) is None
    images = ranks[0].spool.tickets
    until(lambda: all(each.failed for each in images()[0]), "their marks: they may be evicted")
    for rank in ranks:
        rank.save(3, {"model": {"w": torch.ones(3)}})
    for rank in ranks:
        rank.wait_all(250)


def test_a_save_that_is_cancelled_before_it_is_begun(
    ranks: Ranks, root: Path, api: Api, stack_settings: Settings
) -> None:
    worker = find_part(stack_settings, "worker")
    worker.suspend()
    try:
        save(*ranks)
        set_state(api, root, Cancelled(message="not needed"))
    finally:
        worker.resume()
    assert_all_say(ranks, "Cancelled: not needed")
    said = {failure_path(image.slot).read_text() for image in ranks[0].spool.tickets()[0]}
    assert said == {"Cancelled: not needed"}  # which a rank may read before the journal
