"""A run knows what it began from: a step of its job, or what was loaded from another one."""

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync import Checkpoints
from trinity_sync.cli.commands import app
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.formats.merge import merge_steps
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import is_parent_there
from trinity_sync.storage.runs import list_runs


def commit(job: Job, step: int, *, run: int = 1) -> None:
    model = {"weight": torch.full((4,), float(step))}
    job.commit_states(step, {"model": model, "optim": {"lr": 0.1}}, run=run)


def show(root: Path, step: int) -> str:
    return CliRunner().invoke(app, ["show", str(root), str(step)]).stdout


@pytest.fixture
def another(tmp_path: Path, spool_folder: Path) -> CheckpointCoordinator:
    """A coordinator of another root, with no server to ask."""
    settings = Settings(spool=spool_folder, home=tmp_path)
    return CheckpointCoordinator(tmp_path / "another", run_key="another", settings=settings)


def test_a_resumed_run_knows_the_commit_that_it_began_from(job: Job, coordinator_of: Open) -> None:
    commit(job, 10)
    first = coordinator_of(run_key="second")
    assert first.parents == ()
    first.load(10)
    expected = require_committed(job.root, 10).as_parent(job.root)
    assert first.parents == (expected,)
    assert (expected.step, expected.run) == (10, 1)
    assert [each.parents for each in list_runs(job.root) if each.number == first.run] == [
        (expected,)
    ]


def test_a_process_that_loaded_nothing_learns_what_its_run_began_from(
    job: Job, coordinator_of: Open
) -> None:
    commit(job, 10)
    critic, actor = coordinator_of(run_key="second"), coordinator_of(run_key="second")
    critic.begin()
    assert critic.parents == ()
    actor.load(10)
    (run,) = (each for each in list_runs(job.root) if each.number == actor.run)
    assert [each.step for each in run.parents] == [10]


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
