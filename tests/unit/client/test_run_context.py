"""Which run a process takes part in, what it is told of a root, and what it began from."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.command import invoke
from tests.support.job import Job
from tests.support.steps import save_foreign_step
from tests.unit.conftest import Open
from trinity_sync import Checkpoints
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.run_context import RunContext
from trinity_sync.errors import CommitError
from trinity_sync.formats.merge import merge_steps
from trinity_sync.layout import ITERATION_FILES, PRIVATE_FOLDER
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.manifest import is_parent_there
from trinity_sync.storage.runs import list_runs


def test_a_run_that_loads_nothing_where_steps_are_is_told_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert RunContext(job.root, "first").get().number == 1
    job.commit_states(10, {"model": {"w": torch.ones(3)}})
    assert caplog.text == ""
    assert RunContext(job.root, "first").get().number == 1  # another rank
    loaded = RunContext(job.root, "second")
    loaded.begin_at(10)
    assert loaded.get().number == 2
    assert caplog.text == ""
    forgot = RunContext(job.root, "third")
    assert forgot.get().number == forgot.get().number == 3
    assert caplog.text.count("Run 3 begins at step 0") == 1
    assert "load step 10 first" in caplog.text


def test_a_link_to_no_file_at_the_name_of_the_next_run_is_told(job: Job) -> None:
    assert RunContext(job.root, "first").get().number == 1
    (job.root / PRIVATE_FOLDER / "runs/2.json").symlink_to("nowhere")
    with pytest.raises(CommitError, match=r"2\.json is torn or edited"):
        RunContext(job.root, "second").get()


def commit_in_run(job: Job, run: int, key: str, step: int, resumed_from: int | None = None) -> None:
    context = RunContext(job.root, key)
    if resumed_from is not None:
        context.begin_at(resumed_from)
    assert context.get().number == run
    job.commit_states(step, {"model": {"w": torch.full((3,), float(step))}}, run=run)


@pytest.mark.parametrize("loads", [30, 10, None])
def test_a_run_comes_after_those_of_the_steps_that_were_copied_into_its_root(
    job: Job, loads: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By a copy of the steps' folders alone: without the private folder, which names the runs."""
    commit_in_run(job, 1, "first", 10)
    commit_in_run(job, 2, "second", 20, 10)
    commit_in_run(job, 3, "third", 30, 20)
    shutil.rmtree(job.root / PRIVATE_FOLDER / "runs")
    commit_in_run(job, 4, "in the copy", 40, loads)
    newest = find_newest(job.root)
    assert newest is not None
    assert newest.step == 40
    assert ("begins at step 0" in caplog.text) == (loads is None)


def test_a_run_that_begins_where_another_system_has_saved_is_told(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (20, 40):
        save_foreign_step(job.root, step)
    loaded = RunContext(job.root, "first")
    loaded.begin_at(40)
    assert loaded.get().number == 1
    assert caplog.text == ""
    assert RunContext(job.root, "second").get().number == 2
    assert "steps of another system; the newest is 40" in caplog.text


def test_a_run_that_goes_back_behind_a_step_of_another_system_is_told(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    commit_in_run(job, 1, "first", 10)
    pointer = job.root / ITERATION_FILES["checkpoint"]
    for key, step, told in (("earlier", 5, 0), ("later", 40, 1), ("no longer", 10, 1)):
        if step != 10:
            save_foreign_step(job.root, step)
        pointer.write_text(str(step))
        RunContext(job.root, key).begin_at(10)
        assert caplog.text.count("latest pointer names step 40 of another system") == told
    pointer.write_text("40")
    RunContext(job.root, "from there").begin_at(40)
    assert caplog.text.count("of another system") == 1


def commit(job: Job, step: int, *, run: int = 1) -> None:
    model = {"weight": torch.full((4,), float(step))}
    job.commit_states(step, {"model": model, "optim": {"lr": 0.1}}, run=run)


def show(root: Path, step: int) -> str:
    return invoke("show", root, step).stdout


@pytest.fixture
def another(tmp_path: Path, settings: Settings) -> CheckpointCoordinator:
    """A coordinator of another root, with no server to ask."""
    return CheckpointCoordinator(tmp_path / "another", run_key="another", settings=settings)


def test_a_resumed_run_knows_the_commit_that_it_began_from(job: Job, coordinator_of: Open) -> None:
    """Also if a process that loads nothing has begun it first."""
    commit(job, 10)
    critic, actor = coordinator_of(run_key="second"), coordinator_of(run_key="second")
    critic.begin()
    assert critic.parents == actor.parents == ()
    actor.load(10)
    expected = require_committed(job.root, 10).as_parent(job.root)
    assert actor.parents == (expected,)
    assert (expected.step, expected.run) == (10, 1)
    (run,) = (each for each in list_runs(job.root) if each.number == actor.run)
    assert (run.resumed_from, run.resumed_run, run.parents) == (10, 1, (expected,))


def test_a_run_that_starts_with_weights_of_another_root_names_them(
    job: Job, another: CheckpointCoordinator, tmp_path: Path
) -> None:
    for step in (10, 20):
        commit(job, step)
    merge_steps(job.root, "10,20", tmp_path / "merges")
    model = {"weight": torch.zeros(4)}
    with another as saves:
        Checkpoints(tmp_path / "merges").load_into(20, model)
        saves.begin()
        (parent,) = saves.parents
        assert (Path(parent.root).name, parent.step, parent.weight) == ("merges", 20, 1.0)
        begun = Job(saves.root, saves.spool)
        commit(begun, 1)
        begun.kill()
    assert f"its run began from step 20 of run 1 in {parent.root}\n" in show(saves.root, 1)
    merged = show(tmp_path / "merges", 20)
    assert f"merged from step 10 of run 1 in {job.root} x 0.5\n" in merged
    shutil.rmtree(tmp_path / "merges")
    assert f"in {parent.root}, which is not there as it was" in show(saves.root, 1)


def test_what_was_loaded_counts_for_a_run_that_has_not_begun_and_whose_coordinator_is_there(
    job: Job, another: CheckpointCoordinator, coordinator_of: Open
) -> None:
    for step in (10, 20):
        commit(job, step)
    for step in (10, 10):
        Checkpoints(job.root).load(step)
    with another as saves:
        saves.begin()
        assert [each.step for each in saves.parents] == [10]
        Checkpoints(job.root).load(20)
        assert [each.step for each in saves.parents] == [10]
    later = coordinator_of(run_key="later")
    later.begin()
    assert later.parents == ()


def test_an_export_or_the_loss_of_the_optimizer_leaves_a_parent_there(job: Job) -> None:
    commit(job, 10)
    whole = require_committed(job.root, 10)
    assert whole.keep_weights() != whole
    assert whole.keep_weights().weights_digest == whole.weights_digest
    assert is_parent_there(whole.as_parent(job.root))
