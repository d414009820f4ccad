"""The handle that a save returns: what it cost, and whether it is committed."""

import threading
from typing import Any

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from trinity_sync.errors import ConfigError, SaveFailedError, SaveTimeoutError
from trinity_sync.layout import Kind
from trinity_sync.snapshot.mutation_guard import SMALL
from trinity_sync.snapshot.stager import Stager
from trinity_sync.storage.restore import load_states

STATES = {"model": {"w": torch.arange(9.0)}}


def test_a_handle_tells_whether_its_save_is_committed(coordinator_of: Open) -> None:
    """That of a sync which the checkpoint of its step serves, too."""
    trigger = CommitsWhenTold()
    saves = coordinator_of(trigger=trigger)
    first, sync = saves.save(4, STATES), saves.save(4, STATES, kind="state_dict")
    for each in (first, sync):
        assert not each.committed
        with pytest.raises(SaveTimeoutError, match="step4"):
            each.wait(0.1)
    trigger.go()
    for each in (first, sync):
        each.wait(250)
        assert each.committed
    assert (first.components, first.stall_s > 0, first.nbytes > 36) == (("model",), True, True)
    saves.wait_all(0)  # a handle takes no failure, and leaves nothing to wait for


def test_a_save_that_could_not_be_staged_has_failed(coordinator_of: Open) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    saves.save(4, STATES).wait(250)
    lost = saves.save(5, {"model": {"w": threading.Lock()}})  # nothing can pickle that
    assert not lost.committed
    with pytest.raises(SaveFailedError, match=r"step 5.*cannot pickle"):
        lost.wait()
    with pytest.raises(SaveFailedError, match="step 5"):  # also for those who have no handle
        saves.wait_all(250)


@pytest.mark.parametrize("changes", [False, True])
def test_an_overlapped_save_ends_as_it_was_staged(
    coordinator_of: Open, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    weights = torch.zeros(SMALL)
    saves.save(4, STATES).wait(250)
    begin, copy = threading.Event(), Stager.copy

    def copy_later(*arguments: Any, **options: Any) -> Any:
        assert begin.wait(250)
        return copy(*arguments, **options)

    monkeypatch.setattr(Stager, "copy", copy_later)
    handle = saves.save(5, {"model": {"w": weights}}, overlap=True)
    assert not handle.committed
    if changes:
        weights += 1
    begin.set()
    if changes:
        with pytest.raises(SaveFailedError, match=r"step 5.*changed"):
            handle.wait(250)
        with pytest.raises(SaveFailedError, match="step 5"):
            saves.wait_all(250)
    else:
        handle.wait(250)
    assert handle.committed is not changes


@pytest.mark.parametrize("option", [{"export": "hf_model"}, {"keep": 2}])
def test_what_a_submitted_save_was_not_told_to_do_is_refused(
    coordinator_of: Open, option: dict[str, Any]
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    saves.save(4, STATES)
    with pytest.raises(ConfigError, match=f"{next(iter(option))} comes after the checkpoint"):
        saves.save(4, STATES, **option)
    saves.save(5, STATES, **option)
    assert saves.save(5, STATES, **option).images == ()
    assert saves.save(5, STATES).images == ()


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint"])
def test_an_overlapped_save_fails_if_a_few_elements_of_what_was_saved_have_changed(
    coordinator_of: Open, kind: Kind
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    model = {"w": torch.zeros(SMALL)}
    saves.save(5, {"model": model}, kind=kind).wait(250)
    model["w"][:10] = 7.0
    with pytest.raises(SaveFailedError, match="step 5"):
        saves.save(5, {"model": model}, overlap=True).wait(250)


def test_an_overlapped_save_has_what_has_changed_since_an_upload(coordinator_of: Open) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    model = {"w": torch.zeros(SMALL)}
    saves.upload(5, lambda: model)
    model["w"][:10] = 7.0
    saves.save(5, {"model": model}, overlap=True).wait(250)
    assert torch.equal(load_states(saves.root, 5, "actor")["model"]["w"], model["w"])


def test_an_overlapped_save_after_the_end_is_copied_at_the_call(coordinator_of: Open) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    saves.save(5, STATES, overlap=True).wait(250)
    saves.close()
    saves.save(6, STATES, overlap=True)
    saves._watcher._trigger.finish()
    assert load_states(saves.root, 6, "actor")["model"]["w"][8] == 8


def test_a_component_after_its_step_was_submitted_and_an_unknown_role_are_refused(
    saves: Saves,
) -> None:
    saves.save(19, STATES)
    with pytest.raises(ConfigError, match="in one call"):
        saves.save(19, {"optim": {"w": torch.ones(3)}})
    with pytest.raises(ConfigError, match="TRINITY_SYNC_ROLES"):
        saves.save(20, STATES, role="critic")
