"""Where a run begins: at the step that was loaded, once, and never within another run."""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk import flip_a_byte
from tests.support.job import Job, mapped_nbytes
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.client.run_context import RunContext
from trinity_sync.errors import CommitError, ConfigError, SaveError, SupersededError
from trinity_sync.layout import KINDS, Kind, step_folder
from trinity_sync.orchestration.report.steps import read_step
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.snapshot.slot import Slot
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import (
    read_latest_pointer,
    read_step_state,
    repair_latest_pointer,
    require_committed,
)
from trinity_sync.storage.runs import find_newest_run
from trinity_sync.storage.save_functions import read_statuses
from trinity_sync.storage.steps_in_use import list_leases, resolve_step

MODEL = "actor/model_world_size_1_rank_0.pt"


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((5000,), float(step))}}


@pytest.fixture
def saved(coordinator_of: Open, job: Job) -> Path:
    """A root in which a first run has committed steps 30 and 40."""
    first = coordinator_of(run_key="first")
    for step in (30, 40):
        first.save(step, state(step))
        job.commit(step)
    return job.root


@pytest.mark.parametrize("opens", [False, True], ids=["load", "open"])
def test_a_step_that_cannot_be_loaded_begins_nothing(
    saved: Path, coordinator_of: Open, job: Job, opens: bool
) -> None:
    for note in job.spool.folder.glob("*.kept"):
        note.unlink()
    flip_a_byte(step_folder(saved, 40) / MODEL, -3000)
    second = coordinator_of(run_key="second")
    with pytest.raises(CommitError, match="or load another step"), ExitStack() as opened:
        opened.enter_context(second.open(40)) if opens else second.load(40)
    assert second.load(30)["model"]["w"][0] == 30
    assert find_newest_run(saved).resumed_from == 30
    assert list_leases(saved) == []


@pytest.mark.parametrize("from_spool", [True, False], ids=["spool", "disk"])
def test_an_opened_step_keeps_its_values_while_training_saves_on(
    saved: Path, coordinator_of: Open, job: Job, from_spool: bool
) -> None:
    for note in job.spool.folder.glob("*.kept") if not from_spool else ():
        note.unlink()
    second = coordinator_of(run_key="second")
    with second.open(40) as states:
        assert find_newest_run(saved).resumed_from == 40
        maps = Path("/proc/self/maps").read_text().splitlines()
        private = [each for each in maps if " rw-p " in each and str(job.spool.folder) in each]
        assert bool(private) == from_spool
        for step in (50, 60, 70):
            second.save(step, state(step))
            job.commit(step, run=2)
        assert states["model"]["w"].unique() == 40
        states["model"]["w"].zero_()
    assert list_leases(saved) == []
    assert torch.load(step_folder(saved, 40) / MODEL)["w"].unique() == 40
    for path in job.spool.folder.glob("*.slot"):
        slot = Slot(path)
        assert slot.try_lock()
        slot.close(remove=False)


def test_a_resume_never_finds_a_step_that_was_superseded(
    saved: Path, coordinator_of: Open, job: Job
) -> None:
    second = coordinator_of(run_key="second")
    second.load(30)
    assert second.latest_step() == resolve_step(saved, "latest") == 40
    second.save(35, {"model": {"w": torch.full((5000,), float("nan"))}})
    job.commit(35, run=2)
    assert second.latest_step() == 35
    assert Checkpoints(saved).latest_step(healthy=True) == resolve_step(saved, "healthy") == 30
    os.truncate(step_folder(saved, 35) / "actor/model_world_size_1_rank_0.pt", 10)
    repair_latest_pointer(saved, "checkpoint")
    third = coordinator_of(run_key="third")
    assert third.latest_step() == Checkpoints(saved).latest_step() == 30
    assert read_latest_pointer(saved, "checkpoint") == resolve_step(saved, "latest") == 30


def test_a_step_that_was_superseded_counts_again_after_a_resume_from_it(
    saved: Path, coordinator_of: Open, job: Job
) -> None:
    second = coordinator_of(run_key="second")
    second.load(30)
    second.close()
    assert read_step_state(saved, 40).state == "superseded"
    coordinator_of(run_key="third").load(40)
    assert read_step_state(saved, 40).state == "valid"
    job.stage(31, state(31), run=2)
    with pytest.raises(SupersededError, match="run 3 resumed from step 40"):
        job.commit(31, run=2)


def test_a_run_that_has_resumed_touches_the_memory_of_its_first_save(
    saved: Path, coordinator_of: Open, job: Job
) -> None:
    shutil.rmtree(job.spool.folder)  # as on another node
    resumed = coordinator_of(run_key="second")
    resumed.load(40)
    resumed._stager.memory.run(looks=False)
    slot = job.spool.slot("actor", "model", 0, 0)
    assert mapped_nbytes(slot) >= 20_000
    resumed.save(41, state(41))
    assert [each.slot for each in job.spool.tickets()[0]] == [slot]


def test_a_process_that_has_loaded_one_role_touches_no_memory_of_another(
    coordinator_of: Open, job: Job
) -> None:
    both = coordinator_of(roles=("actor", "critic"), run_key="first")
    for role in ("actor", "critic"):
        job.roles = both.roles
        both.save(1, state(1), role=role)
    job.commit(1)
    both.close()
    assert not job.spool.folder.exists()
    resumed = coordinator_of(roles=("actor", "critic"), run_key="second")
    resumed.load(1, role="critic")
    resumed._stager.memory.run(looks=False)
    assert [path.name for path in job.spool.folder.glob("*0.slot")] == ["critic.model.rank0.0.slot"]


def test_a_run_that_has_resumed_tells_at_once_that_its_saves_do_not_fit(
    saved: Path, coordinator_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = coordinator_of(run_key="second")
    resumed._stager._ranks = 1 << 50  # of this node
    resumed.load(40)
    resumed._stager.memory.run(looks=False)
    assert "Saves will be slow, or fail: the images of this job need" in caplog.text
    assert "TRINITY_SYNC_SLOTS=1" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        partial(torch.optim.AdamW, amsgrad=True),
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.SGD,
    ],
)
@pytest.mark.parametrize("layers", [1, 400])
def test_memory_for_a_model_and_its_optimizer_fits_their_images(
    saves: Saves, job: Job, make: Callable[..., torch.optim.Optimizer], layers: int
) -> None:
    frozen = torch.nn.Linear(1024, 7000).requires_grad_(False)
    norms = (torch.nn.BatchNorm1d(1024) for _ in range(layers))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), *norms, frozen)
    optimizer = make(model.parameters(), lr=0.1)
    saves.prewarm({"model": model, "optim": optimizer, "extra_state": 10_000})
    saves._stager.memory.run(looks=False)
    slots = [job.spool.slot("actor", name, 0, 0) for name in ("model", "optim")]
    sizes = [slot.stat().st_size for slot in slots]
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    saves.save(1, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    assert [slot.stat().st_size for slot in slots] == sizes
    trained = 4 if optimizer.defaults.get("amsgrad") else 3
    times = [trained if each.requires_grad else 1 for each in model.parameters()]
    needed = sum(n * each.nbytes for n, each in zip(times, model.parameters(), strict=True))
    assert sum(sizes) <= 4 * (2 << 20) + needed + layers * 13 * (6 << 10)


def test_a_run_begins_once(saved: Path, coordinator_of: Open) -> None:
    second = coordinator_of(run_key="second")
    second.load(40)
    assert second.load(40)["model"]["w"][0] == 40
    with pytest.raises(ConfigError, match="began at step 40 and cannot begin again at step 30"):
        second.load(30)


def test_a_restart_with_the_key_of_the_run_before_is_refused(
    saved: Path, coordinator_of: Open
) -> None:
    again = coordinator_of(run_key="first")
    with pytest.raises(ConfigError, match="give TRINITY_SYNC_RUN_KEY a new value at each start"):
        again.load(40)
    coordinator_of(run_key="second").load(30)
    with pytest.raises(ConfigError, match=r"began at step 30 .* TRINITY_SYNC_RUN_KEY"):
        coordinator_of(run_key="second").load(40)


@pytest.mark.parametrize(("step", "committed"), [(30, 30), (15, 40)])
def test_a_restart_that_loads_nothing_saves_no_step_up_to_the_newest_of_its_key(
    saved: Path, coordinator_of: Open, step: int, committed: int
) -> None:
    again = coordinator_of(run_key="first")
    with pytest.raises(ConfigError, match=rf"run 1, .* has committed step {committed}; give TRIN"):
        again.save(step, state(0))


def test_an_emergency_save_right_after_a_resume_is_a_whole_checkpoint(
    coordinator_of: Open, job: Job, saved: Path
) -> None:
    second = coordinator_of(run_key="second")
    loaded = second.load(40)
    words = second.emergency_save(40, {**loaded, "extra_state": {"rng": 1}}, deadline_s=0.5)
    assert words.submitted == ("model", "extra_state")
    assert {sealed.ticket.kind for sealed in job.spool.tickets()[0]} == {"checkpoint"}
    job.commit(40, "model", "extra_state", run=2)
    assert second.latest_step() == 40
    assert coordinator_of(run_key="third").load(40)["extra_state"] == {"rng": 1}


def test_a_state_that_comes_after_register_and_monitor_is_refused(saves: Saves) -> None:
    saves.save_sync(lambda: None, 10)
    asyncio.run(saves.register_and_monitor(10))
    with pytest.raises(ConfigError, match=r"step 10: register_and_monitor has submitted .* it"):
        saves.save(10, state(10))
    saves.save(10, state(10), kind="state_dict")
    saves.save(20, state(20))


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint"])
def test_a_state_that_has_changed_is_not_taken_for_the_one_of_its_step(
    saves: Saves, job: Job, kind: Kind
) -> None:
    changing = state(10)
    saves.save(10, changing, kind=kind)
    assert saves.save(10, changing, kind=kind).images == ()
    changing["model"]["w"][7] = -1
    (image,) = saves.save(10, changing).images
    job.commit(10, kind=kind)  # either of the two
    ((late,), _) = job.spool.tickets()
    if kind == "checkpoint":
        assert late.failed
    else:
        assert late.ticket.image == image
        with pytest.raises(SaveError, match="with other content"):
            job.commit(10)


class Unlike:
    """Equals nothing, so that a state with it is laid out afresh each time."""

    def __init__(self, count: int) -> None:
        self.count = count


def test_a_state_with_objects_of_the_users_own_is_staged_again_only_if_it_has_changed(
    saves: Saves,
) -> None:
    changing: dict[str, Any] = state(10)
    changing["model"]["counter"] = Unlike(1)
    saves.save(10, changing, kind="state_dict")
    assert saves.save(10, {"model": changing["model"]}, kind="state_dict").images == ()
    changing["model"]["counter"].count = 2
    assert len(saves.save(10, {"model": changing["model"]}, kind="state_dict").images) == 1


def test_a_folder_of_metadata_without_files_is_no_metadata(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    (tmp_path / "meta").mkdir()
    staged = coordinator_of().save(10, state(10), metadata=tmp_path / "meta")
    assert staged.components == ("model",)
    job.commit(10)


def test_ranks_and_roles_of_one_run_may_load_or_not_in_any_order(
    saved: Path, coordinator_of: Open, job: Job
) -> None:
    early, loading, late = (coordinator_of(rank, 3, run_key="second") for rank in range(3))
    job.world_size = 3
    early.record_metrics(40, {"reward": 1.0})  # with nothing to load, it begins the run
    loading.resumed_from(40)
    loading.resumed_from(40)
    late.record_metrics(41, {"reward": 1.0})
    for each in (early, loading, late):
        each.save(41, state(41))
    assert job.commit(41, run=2).run == find_newest_run(saved).number == 2


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")])
def test_a_checkpoint_follows_the_sync_of_a_step_that_the_run_before_reached_with_the_same_weights(
    coordinator_of: Open, job: Job, roles: tuple[str, ...]
) -> None:
    whole = {**state(40), "optim": {"m": torch.ones(3)}}
    job.roles = roles
    for run, key in enumerate(("first", "second"), 1):
        actor, *critic = (coordinator_of(run_key=key, roles=roles) for _ in roles)
        if run == 1:
            actor.save(30, whole)
            for each in critic:
                each.save(30, whole, role="critic")
            job.commit(30, "model", "optim")
        else:
            actor.load(30)
            actor.save(40, state(40), kind="state_dict")
            job.roles = ("actor",)
            job.commit(40, run=2, kind="state_dict")
            job.roles = roles
            assert actor.latest_step() == 40  # the checkpoint stays
            assert require_committed(job.root, 40).checkpoint_run == 1
        actor.save(40, whole)
        for each in critic:
            each.save(40, whole, role="critic")
        job.commit(40, "model", "optim", run=run)
    assert require_committed(job.root, 40).has_kind("checkpoint", roles, run=2)
    assert coordinator_of(run_key="third", roles=roles).load(40)["optim"]["m"][0] == 1


def test_a_checkpoint_that_differs_from_the_one_that_a_sync_left_in_place_names_its_run(
    coordinator_of: Open, job: Job, saved: Path
) -> None:
    coordinator_of(run_key="first").save(50, {**state(50), "optim": {"m": torch.ones(3)}})
    job.commit(50, "model", "optim")
    second = coordinator_of(run_key="second")
    second.load(40)
    second.save(50, state(50), kind="state_dict")
    job.commit(50, run=2, kind="state_dict")
    second.save(50, {**state(50), "optim": {"m": torch.zeros(3)}})
    with pytest.raises(SaveError, match=r"run 1 has committed actor/optim\S+ .* other content"):
        job.commit(50, "model", "optim", run=2)


@pytest.mark.parametrize("by", [*KINDS, "functions"])
def test_a_run_saves_its_steps_in_order(saves: Saves, job: Job, by: Kind | str) -> None:
    kind = "checkpoint" if by == "functions" else by
    if by == "functions":
        saves.save_sync(lambda: None, 300)
        asyncio.run(saves.register_and_monitor(300, checkpoint_thread_count=1))
        commit(job.save(300), [], [*read_statuses(job.spool, job.save(300, kind=kind))])
    else:
        saves.save(300, state(300), kind=kind)
        job.commit(300, kind=kind)
        assert saves.save(300, state(300), kind=kind).images == ()
    with pytest.raises(ConfigError, match=r"step 15, role actor, .* after step 300.* new run"):
        saves.save(15, state(15), kind=kind, keep=2)
    saves.save(301, state(301), kind=kind)


def whole(step: int) -> dict[str, Any]:
    return {**state(step), "optim": {"lr": 0.1}, "extra_state": {"rng": step}}


@pytest.fixture
def whole_step(coordinator_of: Open, job: Job) -> Path:
    coordinator_of(run_key="first").save(40, whole(40))
    job.commit(40, *whole(40))
    for note in job.spool.folder.glob("*.kept"):
        note.unlink()
    return job.root


@pytest.mark.parametrize("fills", [False, True], ids=["load", "load_into"])
def test_a_resume_reads_the_components_that_it_asks_for_and_no_others(
    whole_step: Path, coordinator_of: Open, fills: bool
) -> None:
    flip_a_byte(step_folder(whole_step, 40) / "actor/optim_world_size_1_rank_0.pt", -3)
    second = coordinator_of(run_key="second")
    live = {"w": torch.zeros(5000)}
    parts = ("model", "extra_state")
    given = {"model": live}
    loaded = second.load_into(40, given, only=parts) if fills else second.load(40, only=parts)
    assert sorted(loaded) == ["extra_state", "model"]
    assert loaded["model"]["w"].unique() == 40
    assert (loaded["model"]["w"] is live["w"]) == fills
    assert [*Checkpoints(whole_step).load(40, only="model")] == ["model"]


def test_the_record_of_a_run_says_what_it_left_out_of_each_role(
    whole_step: Path, coordinator_of: Open, job: Job
) -> None:
    for _ in range(2):  # as of two processes of the run
        second = coordinator_of(run_key="second")
        second.load(40, only=("model",))
    assert find_newest_run(whole_step).left_out == ("actor/extra_state", "actor/optim")
    for part in ("optim", "model"):  # one by one, and again
        second.load(40, only=part)
    second.save(41, state(41))
    job.commit(41, run=2)
    assert read_step(whole_step, 41).left_out == ("actor/extra_state",)
    assert read_step(whole_step, 40).left_out == ()
    coordinator_of(run_key="third").load(40)
    assert find_newest_run(whole_step).left_out == ()


def test_a_load_of_one_component_more_does_not_need_the_room_of_a_record(small_disk: Path) -> None:
    root = small_disk / "ckpts"
    root.mkdir()
    open_identity(root)
    run = RunContext(root, "run")
    run.begin_at(40, {"actor": ["extra_state", "optim"]})
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    run.begin_at(40, {"actor": ["extra_state"]})
    run.close()
    assert find_newest_run(root).left_out == ("actor/extra_state", "actor/optim")


def test_a_component_that_a_step_lacks_is_refused_with_those_that_it_has(
    whole_step: Path, coordinator_of: Open
) -> None:
    second = coordinator_of(run_key="second")
    known = "no component modle: it has extra_state, model, optim"
    for load in (second.load, Checkpoints(whole_step).load):
        with pytest.raises(ConfigError, match=known):
            load(40, only=("modle",))
    with pytest.raises(ConfigError, match=known):
        second.load_into(40, {}, only=("modle",))
    assert find_newest_run(whole_step).number == 1


def test_weights_that_all_ranks_have_alike_are_loaded_alone_by_any_number_of_ranks(
    coordinator_of: Open, job: Job
) -> None:
    job.world_size = 2
    for rank in (0, 1):
        coordinator_of(rank=rank, world_size=2, run_key="first").save(
            1, {**state(1), "optim": {"of": rank}}
        )
    job.commit(1, "model", "optim")
    alone = Checkpoints(job.root)
    with pytest.raises(CommitError, match=r"was saved by 2 rank\(s\), and this is rank 0 of 1"):
        alone.load(1)
    assert alone.load(1, only="model")["model"]["w"].unique() == 1
    assert alone.load(1, rank=1, world_size=2)["optim"] == {"of": 1}
