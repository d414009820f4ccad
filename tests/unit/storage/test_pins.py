"""Pins and tags keep steps, and a tag names one step at every instant."""

import threading

import pytest
import torch

from tests.support.job import Job
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.integrations.trainer_saves import TrainerSaves
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import (
    BEST,
    list_best,
    list_pins,
    list_steps_in_use,
    pin,
    pin_ahead,
    resolve_step,
    tag,
    unpin,
)


@pytest.fixture
def committed(job: Job) -> Job:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    return job


def test_a_tag_names_a_step_and_keeps_it_until_it_is_removed(committed: Job) -> None:
    pin(committed.root, 4)
    tag(committed.root, 4, "best", "reward 0.9")
    tag(committed.root, 4, "paper-v1")
    assert list_steps_in_use(committed.root) == {
        4: ["pinned", "tagged best: reward 0.9", "tagged paper-v1"]
    }
    assert resolve_step(committed.root, "paper-v1") == resolve_step(committed.root, "4") == 4
    assert unpin(committed.root, 4)
    assert unpin(committed.root, "best")
    assert list_steps_in_use(committed.root) == {4: ["tagged paper-v1"]}
    with pytest.raises(ConfigError, match=r"'best' is neither .* \(tags: paper-v1\)"):
        resolve_step(committed.root, "best")


def test_a_tag_does_not_name_the_step_that_another_run_has_put_in_place_of_its_own(
    committed: Job,
) -> None:
    tag(committed.root, 4, "best")
    for key in ("first", "second"):
        open_run(committed.root, key, 0)
    committed.commit_states(4, {"model": {"w": torch.ones(3)}}, run=2)
    with pytest.raises(
        CommitError, match=r"step 4 of run 1 .* run 2 has replaced it, .* To move tag best"
    ):
        resolve_step(committed.root, "best")
    tag(committed.root, 4, "best")
    assert resolve_step(committed.root, "best") == 4


def test_the_best_step_is_not_one_of_its_number_that_a_later_run_has_superseded(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(committed.spool.folder.parent))
    pin_ahead(committed.root, 2, BEST)
    for key, resumed_from in (("first", 0), ("second", 3)):
        open_run(committed.root, key, resumed_from)
    committed.commit_states(2, {"model": {"w": torch.ones(3)}})
    pin_ahead(committed.root, 4, BEST)  # as run 2 did, whose save of it failed
    saves = TrainerSaves(committed.root)
    assert resolve_step(committed.root, "best") == saves.find_best(4) == 2
    saves.keep_best(4)
    assert list_best(committed.root) == [2, 4]


def test_a_tag_moves_to_another_step_by_force_only(committed: Job) -> None:
    committed.commit_states(5, {"model": {"w": torch.zeros(3)}})
    tag(committed.root, 4, "best")
    tag(committed.root, 4, "best", "the same step: nothing moves")
    with pytest.raises(ConfigError, match=r"best is at step 4 .* best --force"):
        tag(committed.root, 5, "best")
    assert resolve_step(committed.root, "best") == 4
    tag(committed.root, 5, "best", force=True)
    assert [(each.step, each.name) for each in list_pins(committed.root)] == [(5, "best")]


@pytest.mark.parametrize("name", ["40", "", "../40", "a b", ".best", "-best", "v1.0"])
def test_what_cannot_be_a_tag_is_refused(committed: Job, name: str) -> None:
    with pytest.raises(ConfigError, match="tag"):
        tag(committed.root, 4, name)
    assert list_pins(committed.root) == []


def test_a_torn_tag_is_an_error_until_it_is_set_again_or_removed(committed: Job) -> None:
    for name in ("best", "good"):
        tag(committed.root, 4, name)
    for mend in (
        lambda: tag(committed.root, 4, "best", force=True),
        lambda: unpin(committed.root, "best"),
    ):
        (committed.root / ".trinity_sync/pins/best.json").write_text('{"st')
        with pytest.raises(CommitError, match="the step of the tag is unknown"):
            list_steps_in_use(committed.root)
        assert resolve_step(committed.root, "good") == 4
        mend()
        assert list_steps_in_use(committed.root)


def test_a_tag_is_at_a_step_at_every_instant_while_it_moves(committed: Job) -> None:
    committed.commit_states(5, {"model": {"w": torch.zeros(3)}})
    tag(committed.root, 4, "best")

    def move() -> None:
        for step in (5, 4) * 10:
            tag(committed.root, step, "best", force=True)

    mover = threading.Thread(target=move)
    mover.start()
    while mover.is_alive():
        assert resolve_step(committed.root, "best") in (4, 5)
    assert resolve_step(committed.root, "best") == 4
