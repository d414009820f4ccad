"""`Checkpoints` and the command metrics read and annotate the steps of a job that trains."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import Result

from benchmarks.path_calls import watch_path_calls
from tests.support.command import invoke
from tests.support.disk import flip_a_byte
from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync import CheckpointCoordinator, Checkpoints, set_job_settings
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    RootAwayError,
    TrinitySyncError,
    WeightSyncError,
)
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.runs import list_runs, open_run
from trinity_sync.storage.steps_in_use import BEST, list_leases, pin_ahead, tag


def state(step: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, step)
    return {"model": model.state_dict(), "extra_state": {"step": step}}


def save(training: CheckpointCoordinator, job: Job, step: int) -> None:
    training.attach("position", str(step).encode(), step=step)
    training.save(step, state(step))
    job.commit(step, "model", "extra_state", "attachments")


@pytest.fixture
def training(job: Job, coordinator_of: Open) -> CheckpointCoordinator:
    """A living training that has committed the steps 30 and 60."""
    made = coordinator_of()
    for step in (30, 60):
        save(made, job, step)
    return made


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("kind", "weights"),
        ("kind", "checkpoints"),
        ("kind", None),
        ("export", True),
        ("export", "hf"),
    ],
)
def test_an_unknown_kind_or_export_is_refused_at_the_call_and_loses_no_save(
    what: str, value: Any, job: Job, training: CheckpointCoordinator
) -> None:
    steps = Checkpoints(job.root)
    finders = (training.latest_step, steps.latest_step, steps.steps)
    finds = [partial(each, value) for each in finders if what == "kind"]
    for call in [partial(training.save, 90, state(90), **{what: value}), *finds]:
        with pytest.raises(ConfigError, match=f"{what} {value!r} is unknown; pass one of"):
            call()
    save(training, job, 90)
    assert training.latest_step() == 90


def test_an_evaluation_next_to_a_training_reads_everything_and_changes_nothing_but_metrics(
    job: Job, training: CheckpointCoordinator
) -> None:
    before = files_of(job.root)
    spool = sorted(job.spool.folder.rglob("*"))
    steps = Checkpoints(job.root)
    assert steps.latest_step() == steps.latest_step("state_dict") == 60
    assert steps.steps() == [30, 60]
    assert steps.metrics(30) == {}
    loaded = steps.load(30)
    assert loaded["extra_state"] == {"step": 30}
    assert torch.equal(loaded["model"]["weight"], torch.full((2, 3), 30.0))
    model = nn.Linear(3, 2)
    steps.load_into(60, model)
    assert torch.equal(model.weight, torch.full((2, 3), 60.0))
    half = nn.Linear(3, 2, dtype=torch.bfloat16)
    steps.load_into(30, half, dtype=torch.bfloat16)
    assert torch.equal(half.weight, torch.full((2, 3), 30.0, dtype=torch.bfloat16))
    assert steps.attachment(30, "position") == b"30"
    assert list_leases(job.root) == []
    after = files_of(job.root)
    assert set(after) - set(before) <= {".trinity_sync/removal.lock"}
    assert before.items() <= after.items()
    steps.record_metrics(30, {"reward": torch.tensor(0.9), "length": 3})
    steps.record_metrics(30, {"length": 7})
    assert steps.metrics(30) == pytest.approx({"reward": 0.9, "length": 7.0})
    assert {*files_of(job.root)} - {*after} == {
        ".trinity_sync/metrics/30.json",
        ".trinity_sync/metrics/lock",
    }
    assert sorted(job.spool.folder.rglob("*")) == spool
    assert len(list_runs(job.root)) == 1
    save(training, job, 90)
    assert steps.latest_step() == 90


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("60", 60),
        ("latest", 60),
        ("latest~1", 30),
        ("healthy", 60),
        ("good", 30),
        ("best=loss:max", 60),
        ("best=loss:min", 30),
        ("best", 30),
        ("best by keep", 60),
    ],
)
def test_python_and_the_command_take_the_same_names_of_a_step(
    job: Job, training: CheckpointCoordinator, coordinator_of: Open, name: str, step: int
) -> None:
    steps = Checkpoints(job.root)
    for number, loss in ((30, 0.1), (60, 0.2)):
        steps.record_metrics(number, {"loss": loss})
    tag(job.root, 30, "good")
    if name == "best by keep":
        name = "best"
        set_job_settings(job.root, {"keep": "last=1,best=2:loss:max"})
    else:
        for number in (30, 90):  # the next best is not committed yet
            pin_ahead(job.root, number, BEST)
    model = nn.Linear(3, 2)
    assert steps.resolve(name) == steps.load_into(name, model) == step
    assert model.weight.unique().tolist() == [step]
    assert steps.load(name)["extra_state"] == {"step": step}
    assert steps.attachment(name, "position") == str(step).encode()
    assert json.loads(run(job, name, "-o", "json").stdout)["metrics"][0]["step"] == step
    assert coordinator_of(run_key="next").load(name)["extra_state"] == {"step": step}


def test_both_ways_to_load_into_take_a_module_its_state_or_components(
    job: Job, training: CheckpointCoordinator, coordinator_of: Open
) -> None:
    forms: list[Callable[[nn.Module], Any]] = [
        lambda model: model,
        lambda model: {"model": model},
        lambda model: {"model": model.state_dict()},
    ]
    second = coordinator_of(run_key="second")
    for form in forms:
        for face in (Checkpoints(job.root), second):
            model = nn.Linear(3, 2)
            face.load_into("latest", form(model))
            assert model.weight.unique().tolist() == [60]
    model = nn.Linear(3, 2)
    Checkpoints(job.root).load_into(30, model.state_dict())
    assert model.weight.unique().tolist() == [30]


def test_objects_that_have_a_state_are_saved_and_filled_as_components(
    job: Job, coordinator_of: Open
) -> None:
    def make(rate: float) -> tuple[dict[str, Any], nn.Module]:
        model = nn.Linear(3, 2)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), rate)}, model

    parts, model = make(0.1)
    model(torch.ones(3)).sum().backward()
    parts["optim"].step()
    first, second = coordinator_of(), coordinator_of(run_key="second")
    for step in (3, 4):
        first.save(step, dict([*parts.items()][: step - 2]))
        job.commit(step, *[*parts][: step - 2])
    others, _ = make(0.2)
    with pytest.raises(ConfigError, match=r"has no component optim to fill: it has model"):
        second.load_into(3, others)
    second.load_into("latest", others)
    for name, each in parts.items():
        torch.testing.assert_close(others[name].state_dict(), each.state_dict(), rtol=0, atol=0)


def test_an_optimizer_of_other_parameter_groups_is_refused_before_the_model_is_filled(
    job: Job, coordinator_of: Open
) -> None:
    model = nn.Linear(3, 2)
    first, second = coordinator_of(), coordinator_of(run_key="second")
    first.save(3, {"model": model, "optim": torch.optim.AdamW(model.parameters())})
    job.commit(3, "model", "optim")
    other = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    parts = {
        "model": other,
        "optim": torch.optim.AdamW([{"params": [p]} for p in (*other.parameters(),)]),
    }
    refused = (
        r"optim has parameter groups of \[1, 1\] tensors, and in the step of \[2\]. Nothing was"
    )
    with pytest.raises(ConfigError, match=refused):
        second.load_into(3, parts)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
    second.load_into(3, {"model": other})
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_of_objects_in_a_component_the_states_are_saved(job: Job, coordinator_of: Open) -> None:
    models = [nn.Linear(3, 2), nn.Linear(2, 3)]
    optims = [torch.optim.AdamW(model.parameters()) for model in models]
    scheduler, scaler = torch.optim.lr_scheduler.StepLR(optims[0], 1), torch.amp.GradScaler("cpu")
    extra = {"epoch": 3, "scheduler": scheduler, "scaler": scaler}
    given = {"model": dict(zip("gd", models, strict=True)), "optim": optims, "extra_state": extra}
    coordinator_of().save(3, given)
    job.commit(3, *given)
    loaded = Checkpoints(job.root).load(3)
    for each, state in [
        *zip(models, loaded["model"].values(), strict=True),
        *zip(optims, loaded["optim"], strict=True),
        (scheduler, loaded["extra_state"]["scheduler"]),
        (scaler, loaded["extra_state"]["scaler"]),
    ]:
        torch.testing.assert_close(state, each.state_dict(), rtol=0, atol=0)
    assert extra["scheduler"] is scheduler
    again = coordinator_of(run_key="next")
    for name in given:
        with pytest.raises(ConfigError, match=rf"leave {name} out, and pass what load_into return"):
            again.load_into(3, {name: given[name]})
    assert again.load_into(3, {})["extra_state"]["epoch"] == 3
    assert loaded["extra_state"]["epoch"] == 3


class Packed(nn.Module):
    """Its state is a copy, as that of FSDP1 and of quantized modules."""

    def __init__(self, value: float, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(value)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach().clone()


class Counting(nn.Linear):
    """It has extra state."""

    def __init__(self, count: float) -> None:
        super().__init__(4, 4)
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("kind", [Packed, Counting])
def test_a_module_whose_state_is_not_its_tensors_gets_it_by_its_own_method(
    job: Job,
    coordinator_of: Open,
    kind: Callable[[float], nn.Module],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = kind(7)
    coordinator_of().save(3, {"model": saved})
    job.commit(3)
    second = coordinator_of(run_key="second")
    for face in (Checkpoints(job.root), second):
        model = kind(0)
        face.load_into("latest", model)
        torch.testing.assert_close(model.state_dict(), saved.state_dict(), rtol=0, atol=0)
    if kind is Packed:
        second.load_into(3, {"model": kind(0).state_dict()})
        assert "pass the module" in caplog.text


def test_a_run_begins_at_no_step_that_an_object_has_refused(job: Job, coordinator_of: Open) -> None:
    first, second = coordinator_of(), coordinator_of(run_key="second")
    for step, module in ((3, nn.Linear(3, 2)), (4, Packed(4))):
        first.save(step, {"model": module})
        job.commit(step)
    with pytest.raises(RuntimeError, match="size mismatch"):
        second.load_into(4, {"model": Packed(1, size=5)})
    second.load(3)  # a run that had begun at step 4 would refuse it


def test_metrics_of_a_save_are_those_of_its_step(job: Job, coordinator_of: Open) -> None:
    saves = coordinator_of()
    saves.save(4, state(4), metrics={"loss": torch.tensor(0.5)})
    job.commit(4, "model", "extra_state")
    saves.close(timeout=0)
    assert Checkpoints(job.root).metrics("latest") == {"loss": 0.5}
    with pytest.raises(ConfigError, match="not a number"):
        coordinator_of(run_key="second").save(5, state(5), metrics={"loss": "low"})
    assert not job.spool.tickets()[0]


def test_a_commit_has_the_metrics_that_a_killed_trainer_had_not_written(
    job: Job, coordinator_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = coordinator_of()
    monkeypatch.setattr(saves._metrics, "_write", lambda: None)  # killed before its thread runs
    saves.record_metrics(4, {"reward": 2.0})
    saves.save(4, state(4), metrics={"loss": 0.5, "worst": torch.inf})
    Checkpoints(job.root).record_metrics(4, {"loss": 0.25})  # an evaluation, meanwhile
    job.commit(4, "model", "extra_state")
    expected = {"loss": 0.25, "reward": 2.0, "worst": torch.inf}
    assert Checkpoints(job.root).metrics(4) == expected


def test_a_name_of_no_step_says_which_there_are(job: Job, training: CheckpointCoordinator) -> None:
    for name, told in (
        ("bset", r"'bset' is neither .* best=METRIC:max, nor a tag .* \(tags: none\)"),
        ("best", r"'best' is neither"),
        ("latest~2", "has 2 valid checkpoints"),
        ("best=los:min", r"no valid checkpoint .* metric 'los' \(known: loss\)"),
    ):
        Checkpoints(job.root).record_metrics(30, {"loss": 1.0})
        for face in (training.load, Checkpoints(job.root).load):
            with pytest.raises(TrinitySyncError, match=told):
                face(name)


def test_the_best_step_is_the_best_that_is_whole_and_the_files_of_no_other_are_looked_at(
    job: Job, training: CheckpointCoordinator
) -> None:
    steps = Checkpoints(job.root)
    for number, loss in ((30, 0.1), (60, 0.2)):
        steps.record_metrics(number, {"loss": loss})
    asked: list[str] = []
    with watch_path_calls(lambda kind, path: asked.append(path), job.root / "global_step_60"):
        assert steps.resolve("best=loss:min") == 30
    assert not [path for path in asked if path.endswith(".pt")]
    shutil.rmtree(job.root / "global_step_30/actor")
    assert steps.resolve("best=loss:min") == 60


def test_a_corrupted_step_is_neither_listed_nor_loaded(
    job: Job, training: CheckpointCoordinator
) -> None:
    flip_a_byte(job.root / "global_step_30/actor/model_world_size_1_rank_0.pt", -1000)
    steps, model = Checkpoints(job.root), nn.Linear(3, 2)
    kept = model.weight.clone()
    with pytest.raises(CommitError, match="corrupted"):
        steps.load(30)
    with pytest.raises(WeightSyncError, match="corrupted"):
        steps.load_into(30, model)
    assert torch.equal(model.weight, kept)
    with pytest.raises(CommitError, match="not committed"):
        steps.load_into(40, model)


def test_what_an_evaluation_has_found_is_not_taken_for_what_another_run_puts_there(
    job: Job, training: CheckpointCoordinator, coordinator_of: Open
) -> None:
    steps, listing, model = Checkpoints(job.root), Checkpoints(job.root), nn.Linear(3, 2)
    assert steps.latest_step() == 60
    listing.steps()
    reading = Checkpoints(job.root)
    reading.load_into(60, model)
    second = coordinator_of(run_key="second")
    second.load(30)
    second.save(60, state(61))
    job.commit(60, "model", "extra_state", run=2)
    for each in (steps, listing, reading):
        for call in (each.load, each.metrics, partial(each.load_into, target=model)):
            with pytest.raises(CommitError, match=r"step 60 of run 1 .* run 2 has replaced it, or"):
                call(60)
        with pytest.raises(CommitError, match="run 2 has replaced it"):
            each.load("60")
        with pytest.raises(
            CommitError, match=r"or the root was restored\. .* call latest_step\(\)"
        ):
            each.record_metrics(60, {"reward": 1.0})
    assert Checkpoints(job.root).metrics(60) == {}  # of what is there now
    assert steps.load("latest")["extra_state"] == {"step": 61}
    steps.record_metrics(60, {"reward": 0.5})
    assert Checkpoints(job.root).metrics(60) == {"reward": 0.5}


def test_metrics_of_a_step_that_is_gone_count_for_the_run_that_made_it(
    job: Job, training: CheckpointCoordinator, coordinator_of: Open
) -> None:
    steps = Checkpoints(job.root)
    assert steps.steps() == [30, 60]
    coordinator_of(run_key="second").load(30)
    shutil.rmtree(job.root / "global_step_60")
    steps.record_metrics(60, {"reward": 1.0})
    assert (read_metrics(job.root, 1, 60), read_metrics(job.root, 2, 60)) == ({"reward": 1.0}, {})
    shutil.rmtree(job.root / "global_step_30")
    for path in (job.root / ".trinity_sync/runs").glob("*.json"):  # as in a root from before
        path.unlink()
    open_run(job.root, "another", 0)
    with pytest.raises(CommitError, match="or the root was restored"):
        steps.record_metrics(30, {"reward": 1.0})


def test_metrics_create_no_root_that_is_away(job: Job, training: CheckpointCoordinator) -> None:
    steps = Checkpoints(job.root)
    assert steps.steps() == [30, 60]
    away = job.root.rename(job.root.with_name("away"))
    job.root.mkdir()
    for step in (60, 70):
        with pytest.raises(RootAwayError, match=f"job of step {step} is not there. Mount it"):
            steps.record_metrics(step, {"reward": 1.0})
    assert run(job, "60", "reward=1").exit_code == 2
    job.root.rmdir()
    away.rename(job.root)


def test_metrics_of_a_resumed_step_stay_with_the_run_that_saved_it(
    job: Job, training: CheckpointCoordinator, coordinator_of: Open
) -> None:
    second = coordinator_of(run_key="second")
    second.load(60)
    third = coordinator_of(run_key="third", take_over=True)
    third.load(30)
    third.save(60, state(61))
    job.commit(60, "model", "extra_state", run=3)
    second.record_metrics(60, {"reward": 1.0})
    second.close()
    assert (read_metrics(job.root, 1, 60), read_metrics(job.root, 3, 60)) == ({"reward": 1.0}, {})


def test_a_folder_that_does_not_exist_is_refused_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Checkpoints(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def run(job: Job, *arguments: str) -> Result:
    own = {"TRINITY_SYNC_HOME": str(job.root.parent / "home")}
    return invoke("metrics", job.root, *arguments, env=own)


def test_the_command_records_and_shows_metrics_which_retention_heeds(
    job: Job, training: CheckpointCoordinator
) -> None:
    save(training, job, 90)
    assert "has no metrics" in run(job, "30").stderr
    assert run(job, "30", "reward=0.9", "eval/kl=1e-2").exit_code == 0
    assert run(job, "60", "reward=0.1").exit_code == 0
    assert run(job, "latest", "reward=0.2").exit_code == 0
    shown = json.loads(run(job, "30", "-o", "json").stdout)
    assert shown["metrics"] == [
        {"step": 30, "name": "eval/kl", "value": 0.01},
        {"step": 30, "name": "reward", "value": 0.9},
    ]
    rules = Rules(parse_policy("best=1:reward:max"), parse_policy("last=1"))
    assert [each.step for each in plan_prune(job.root, rules, 0).removed] == [60]
    assert len(list_runs(job.root)) == 1


def test_the_command_refuses_what_is_no_metric(job: Job, training: CheckpointCoordinator) -> None:
    for wrong in ("reward", "reward=high", "=0.8", "a:b=1"):
        refused = run(job, "30", wrong)
        assert refused.exit_code == 2, wrong
        assert "error: " in refused.stderr
    assert Checkpoints(job.root).metrics(30) == {}
