"""Of checkpoints that `keep` does not keep, `keep_model` keeps the weights, not for a resume."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import invoke
from tests.support.disk import flip_a_byte
from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.unit.conftest import Open
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.errors import CommitError, ConfigError, SaveError
from trinity_sync.integrations.trainer_saves import TrainerSaves
from trinity_sync.layout import step_folder
from trinity_sync.orchestration.report.steps import read_step
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.prune import prune as drive
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.storage import discovery
from trinity_sync.storage.discovery import (
    find_newest,
    list_removed_files,
    list_unnamed_files,
    read_step_state,
    require_committed,
)
from trinity_sync.storage.job_settings import JobSettings, write_job_settings
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.steps_in_use import pin, resolve_step, unpin
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

OPTIM = "actor/optim_world_size_1_rank_0.pt"


def states(step: int) -> dict[str, Any]:
    weights = {"model": {"w": torch.full((500,), float(step))}}
    return {**weights, "optim": {"m": torch.full((900,), -1.0)}, "extra_state": {"rng": step}}


def save(job: Job, step: int, run: int = 1) -> None:
    job.stage(step, states(step), run=run)
    job.commit(step, *states(step), run=run)


@pytest.fixture
def saved(job: Job) -> Job:
    """A job with the checkpoints 10, 20, 30 and 40 of its first run."""
    open_run(job.root, "first", 0)
    for step in (10, 20, 30, 40):
        save(job, step)
    return job


def prune(root: Path, keep: str = "last=1", models: str | None = "every=20") -> RemovalPlan:
    rules = Rules(parse_policy(keep), ALL, models=parse_policy(models) if models else None)
    return drive(root, plan_prune(root, rules, now=2e9))


def kept(root: Path) -> dict[int, str]:
    """What is there of each step, complete to the last byte; files without a commit count too."""
    found = {}
    for step in sorted(int(path.name.split("_")[2]) for path in root.glob("global_step_*")):
        manifest = require_committed(root, step)
        checked = judge_steps(check_files(choose_files(root, step=step)))
        assert [(each.state, each.wrong) for each in checked] == [("valid", "")]
        assert list_unnamed_files(root, manifest) == []
        found[step] = "weights" if manifest.removed else "whole"
    return found


def test_steps_lose_optimizer_and_extra_state_by_one_policy_and_vanish_by_the_other(
    saved: Job,
) -> None:
    root = saved.root
    before = sum(path.stat().st_size for path in step_folder(root, 20).rglob("*.pt"))
    done = prune(root, "last=2", "every=20")
    assert kept(root) == {20: "weights", 30: "whole", 40: "whole"}
    assert done.changed == [10, 20]
    assert find_newest(root).step == 40
    manifest = read_manifest(root, 20)
    assert manifest.removed == ("extra_state", "optim")
    assert manifest.kinds == ("state_dict",)
    after = sum(path.stat().st_size for path in step_folder(root, 20).rglob("*"))
    assert after < before / 2
    assert prune(root, "last=2", "every=20").changed == []
    assert prune(root, "last=2", None).changed == []  # without a policy, weights stay
    assert prune(root, "last=2", "last=2").changed == [20]


def test_pinned_leased_and_held_steps_stay_whole_and_the_best_weights_stay(saved: Job) -> None:
    root = saved.root
    pin(root, 10)
    write_metrics(root, 1, 20, {"loss": 1.0})
    write_metrics(root, 1, 30, {"loss": 2.0})
    write_metrics(root, 1, 40, {"loss": 3.0})
    with acquire_lease(root, 20, "reader"):
        assert prune(root, "last=1", "best=1:loss:min").spared == ()
        assert kept(root) == {10: "whole", 20: "whole", 40: "whole"}
    prune(root, "last=1", "best=1:loss:min")
    assert kept(root) == {10: "whole", 20: "weights", 40: "whole"}
    write_job_settings(root, {"keep_model": "best=1:loss:min"})
    assert resolve_step(root, "best") == resolve_step(root, "best=loss:min") == 20
    assert [resolve_step(root, name) for name in ("latest", "latest~1")] == [40, 10]


def test_a_resume_from_weights_is_refused_and_names_the_newest_whole_step(
    saved: Job, coordinator_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(saved.spool.folder.parent))
    prune(saved.root)
    second = coordinator_of(run_key="second")
    assert second.latest_step() == 40
    why = "step 20 .* has weights only: .* Resume from 40, the newest whole step"
    for resume in (
        lambda: second.load(20),
        lambda: second.load_into(20, states(0)),
        lambda: second.check_resume(20),
        lambda: second.resumed_from(20),
        lambda: second.open(20).__enter__(),
        lambda: TrainerSaves(saved.root).lease(20).__enter__(),  # as Trainer and Lightning resume
        lambda: rewind(saved.root, 20),
    ):
        with pytest.raises(CommitError, match=why):
            resume()
    assert find_newest_run(saved.root).number == 1
    with pytest.raises(ConfigError, match="no component optim: it has model"):
        second.load(20, only=("optim",))
    assert second.load(20, only=("model",))["model"]["w"].unique() == 20
    assert find_newest_run(saved.root).resumed_from == 20


def test_a_check_that_finds_a_step_whole_is_repeated_when_it_is_loaded(
    saved: Job, coordinator_of: Open
) -> None:
    second = coordinator_of(run_key="second")
    second.check_resume(20)
    prune(saved.root)
    with pytest.raises(CommitError, match="has weights only"):
        second._loader.load(20, "actor", ())


def test_evaluations_read_the_weights_and_lists_say_so(saved: Job) -> None:
    prune(saved.root)
    model = torch.nn.ParameterDict({"w": torch.zeros(500)})
    assert Checkpoints(saved.root).load_into(20, model) == 20
    assert model["w"].unique() == 20
    assert [*Checkpoints(saved.root).load(20)] == ["model"]
    row = read_step(saved.root, 20)
    assert (row.status, row.kind, row.notes) == ("valid", "state_dict", ["weights only"])
    shown = invoke("show", saved.root, "20").stdout
    assert "weights only: retention has removed extra_state and optim" in shown


def test_a_reader_of_the_earlier_manifest_looks_again(
    saved: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, stale = saved.root, read_manifest(saved.root, 20)
    chosen = choose_files(root, step=20)
    prune(root)
    assert discovery.read_manifest_state(root, stale).state == "valid"
    answers = [stale]
    read = discovery.read_manifest
    monkeypatch.setattr(
        discovery, "read_manifest", lambda *given: answers.pop() if answers else read(*given)
    )
    assert read_step_state(root, 20).manifest == read(root, 20)
    assert [each.state for each in judge_steps(check_files(chosen))] == ["replaced"]
    assert read_step_state(root, 20).state == "valid"


def test_a_flipped_byte_in_the_weights_that_stay_is_found(saved: Job) -> None:
    prune(saved.root)
    flip_a_byte(step_folder(saved.root, 20) / "actor/model_world_size_1_rank_0.pt", -30)
    assert [e.state for e in judge_steps(check_files(choose_files(saved.root, step=20)))] == [
        "corrupted"
    ]
    prune(saved.root, models="last=1")
    assert read_step_state(saved.root, 20).state == "corrupted"  # no policy applies


def test_nothing_is_reduced_unless_the_newest_whole_step_is_valid(saved: Job) -> None:
    plan = plan_prune(saved.root, Rules(parse_policy("last=1"), ALL, models=ALL), now=2e9)
    os.truncate(step_folder(saved.root, 40) / OPTIM, 10)
    assert drive(saved.root, plan).changed == []
    assert read_manifest(saved.root, 20).removed == ()


def test_a_killed_reduction_leaves_steps_whole_or_weights_and_the_next_one_finishes(
    saved: Job, tmp_path: Path
) -> None:
    def copy(name: str) -> Path:
        return shutil.copytree(saved.root, tmp_path / name)

    changes = in_a_process(lambda: prune(copy("all")), tmp_path)
    assert changes > 10
    for moment in range(1, changes + 1):
        root = copy(str(moment))
        in_a_process(lambda root=root: prune(root), tmp_path, die_before=moment)
        assert find_newest(root).step == 40
        for path in root.glob("global_step_*"):
            step = int(path.name.split("_")[2])
            assert read_manifest(root, step).removed in ((), ("extra_state", "optim"))
            require_committed(root, step)
        prune(root)
        assert kept(root) == {20: "weights", 40: "whole"}
        assert not list_removed_files(root, read_manifest(root, 20))
        assert [*(root / ".trinity_sync/trash").iterdir()] == []


@pytest.mark.parametrize("models", ["every=20", "all"], ids=["by removed steps", "by spares"])
def test_a_full_disk_gets_room_for_the_manifests_of_weights(
    small_disk: Path, spool_folder: Path, models: str
) -> None:
    root = small_disk / "ckpts"
    with closing(Job.open(root, spool_folder)) as job:
        open_run(root, "first", 0)
        for step in (10, 20, 30):
            save(job, step)
    if models == "all":  # which removes no step
        (spares := root / ".trinity_sync/spare").mkdir()
        (spares / "left").write_bytes(bytes(1 << 20))
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    done = prune(root, models=models)
    assert [each.step for each, _ in done.reduced] == ([20] if done.removed else [10, 20])
    assert Checkpoints(root).steps() == [30]
    assert Checkpoints(root).steps("state_dict") == [*[10] * (not done.removed), 20, 30]


def test_a_save_of_the_step_makes_it_whole_again(saved: Job) -> None:
    prune(saved.root)
    save(saved, 20)  # by the same run
    assert kept(saved.root) == {20: "whole", 40: "whole"}
    prune(saved.root)
    open_run(saved.root, "second", 10)
    save(saved, 20, run=2)
    assert kept(saved.root)[20] == "whole"
    assert find_newest(saved.root).step == 20


@pytest.mark.parametrize("run", [1, 2])
def test_a_sync_of_the_step_leaves_it_to_keep_model(saved: Job, run: int) -> None:
    prune(saved.root)
    pin(saved.root, 20)
    if run == 2:  # whose weights are those that it has loaded
        open_run(saved.root, "second", 20, resumed_run=1)
    saved.commit_states(20, {"model": states(20)["model"]}, run=run, kind="state_dict")
    now = read_manifest(saved.root, 20)
    assert (now.run, now.removed, now.checkpoint_run) == (run, ("extra_state", "optim"), 0)
    assert not (saved.root / ".trinity_sync/quarantine").exists()
    saved.commit_states(21, {"model": states(21)["model"]}, run=run, kind="state_dict")
    unpin(saved.root, 20)
    rules = Rules(parse_policy("last=1"), parse_policy("last=1"), models=parse_policy("every=20"))
    drive(saved.root, plan_prune(saved.root, rules, now=2e9))
    assert kept(saved.root)[20] == "weights"


@pytest.mark.parametrize("syncs", [[30], [31], [30, 30]], ids=["of it", "later", "of two runs"])
def test_a_run_that_goes_back_to_a_step_and_syncs_it_removes_no_later_checkpoint(
    saved: Job, syncs: list[int]
) -> None:
    for run, step in enumerate(syncs, 2):
        open_run(saved.root, f"run {run}", 30, resumed_run=run - 1)
        saved.commit_states(step, {"model": states(30)["model"]}, run=run, kind="state_dict")
    prune(saved.root, "last=2", None)
    assert {step: kept(saved.root).get(step) for step in (20, 30, 40)} == {
        20: None,
        30: "whole",
        40: "whole",
    }
    save(saved, 50, run=run)
    prune(saved.root, "last=2", None)
    assert Checkpoints(saved.root).steps() == [30, 50]


def test_a_retry_of_a_save_whose_step_was_reduced_ends_at_once(saved: Job) -> None:
    prune(saved.root)
    with pytest.raises(SaveError, match="has been removed or replaced since"):
        saved.persist(20, "optim", rank_timeout_s=60)


def test_a_remote_keeps_the_step_whole_and_brings_it_back(saved: Job, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    replicate(saved.root, url, 20)
    whole = read_manifest(saved.root, 20)
    prune(saved.root)
    assert replicate(saved.root, url, 20).uploaded == 0
    assert fetch(url, 20, tmp_path / "other")[0] == whole
    assert fetch(url, 20, saved.root) == (whole, True)
    assert kept(saved.root)[20] == "whole"
    assert find_newest(saved.root).step == 40
    prune(saved.root)
    open_run(saved.root, "second", 20, resumed_run=1)
    saved.commit_states(20, {"model": states(20)["model"]}, run=2, kind="state_dict")
    assert replicate(saved.root, url, 20).uploaded == 0
    assert fetch(url, 20, tmp_path / "third")[0] == whole


def test_a_step_without_weights_of_its_own_stays_whole_and_says_why(job: Job) -> None:
    open_run(job.root, "first", 0)
    for step in (10, 20):
        job.commit_states(step, {"optim": {"lr": 0.1}})
    reasons = {each.step: why for each, why in prune(job.root, models="all").kept}
    assert "no optimizer to remove alone" in reasons[10]
    assert kept(job.root) == {10: "whole", 20: "whole"}


def test_the_setting_of_the_job_and_the_command_take_the_policy(saved: Job) -> None:
    rules = Rules.of_job(JobSettings(keep="last=2", keep_model="every=20"))
    assert rules.models == parse_policy("every=20")
    assert Rules.of_job(JobSettings()).models is None
    command = ["prune", str(saved.root), "--keep", "last=1", "--keep-model", "every=20"]
    done = invoke(*command, "--dry-run", "-o", "json")
    steps = json.loads(done.stdout)["prune"]["steps"]
    assert {each["step"]: each["status"] for each in steps} == {
        40: "kept",
        30: "would be removed",
        20: "would be reduced to weights",
        10: "would be removed",
    }
    assert kept(saved.root) == dict.fromkeys((10, 20, 30, 40), "whole")


def test_of_several_ranks_and_roles_the_weights_stay_readable_by_any_number(job: Job) -> None:
    job.world_size, job.roles = 2, ("actor", "explorer")
    open_run(job.root, "first", 0)
    for step in (10, 20):
        for rank in (0, 1):
            job.stage(step, {**states(step), "extra_state": {"rank": rank}}, rank=rank)
            job.stage(step, {"extra_state": {"cursor": step}}, rank=rank, role="explorer")
        job.commit(step, *states(step))
    prune(job.root, models="all")
    assert kept(job.root) == {10: "weights", 20: "whole"}
    assert read_manifest(job.root, 10).roles == ("actor",)
    assert Checkpoints(job.root).load(10, rank=1, world_size=2)["model"]["w"].unique() == 10
