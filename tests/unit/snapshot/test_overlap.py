"""Overlapped staging: training goes on at once, and no torn image is ever sealed."""

import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import Program
from tests.unit.snapshot.test_image import SPECIAL, records_in, saved
from trinity_sync.client.state_saver import StateSaver
from trinity_sync.errors import ImageError
from trinity_sync.snapshot.identity import Origin
from trinity_sync.snapshot.mutation_guard import SMALL, compare_rows, has_samples, sample_storages
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.stager import Staged, StagePlan, Stager
from trinity_sync.tensors.memcpy import view_bytes

BIG = SMALL  # elements of float32: four times the bytes that are copied at the call


class Held(Stager):
    """A stager whose copies begin when the test says so."""

    begin: threading.Event

    def copy(self, plan: StagePlan) -> Staged:
        assert self.begin.wait(250)
        return super().copy(plan)


class Saves:
    """A process that saves overlapped, and what it submitted."""

    def __init__(self, folder: Path, *, check: bool = False) -> None:
        self.root = folder / "job"
        self.root.mkdir()
        self.spool = open_job_spool(folder / "spool", self.root)
        self.stager = Held(self.spool)
        self.stager.begin = threading.Event()
        self.submitted: list[int] = []
        self.states = StateSaver(
            self.stager, lambda origin, _: self.submitted.append(origin.step), check_overlap=check
        )

    def save(self, step: int, state: object, overlap: bool = True) -> Staged:
        origin = Origin(str(self.root), 1, "", step, "checkpoint", ("actor",), "actor", 0, 1)
        return self.states.save(origin, {"model": state}, overlap=overlap)

    def copied(self) -> float:
        self.stager.begin.set()
        return self.states.wait_staged()

    def staged(self) -> dict[str, torch.Tensor]:
        (sealed,) = self.spool.tickets()[0]
        content = sealed.slot.read_bytes()[: sealed.ticket.nbytes]
        file = self.root / "staged.pt"
        file.write_bytes(content)
        return torch.load(file, weights_only=False)


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    made = Saves(tmp_path)
    yield made
    made.stager.begin.set()
    made.states.close()


def test_the_call_returns_before_anything_is_copied_or_submitted(saves: Saves) -> None:
    weight = torch.rand(BIG)
    staged = saves.save(1, {"w": weight})
    assert staged.components == ("model",)
    assert staged.nbytes > weight.nbytes
    assert not saves.spool.tickets()[0]
    assert not saves.submitted
    saves.copied()
    assert torch.equal(saves.staged()["w"], weight)
    assert saves.submitted == [1]


def test_small_tensors_and_plain_values_are_those_of_the_call(saves: Saves) -> None:
    state = {"w": torch.zeros(BIG), "mean": torch.zeros(8), "step": torch.tensor(1.0), "lr": [0.1]}
    saves.save(1, state)
    state["mean"] += 1  # as the buffers of a batch norm change in the next forward pass
    state["step"].fill_(2)
    state["lr"][0] = 0.2  # type: ignore[index]
    saves.copied()
    staged = saves.staged()
    assert staged["mean"].tolist() == [0.0] * 8
    assert staged["step"] == 1
    assert staged["lr"] == [0.1]


def test_an_optimizers_step_waits_until_its_tensors_are_copied(saves: Saves) -> None:
    weight = torch.nn.Parameter(torch.rand(BIG))
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: saves.states.wait_staged() and None)
    saves.save(1, {"w": weight.detach()})
    weight.grad = torch.ones_like(weight)
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(0.05)
    assert stepped.is_alive()
    saves.stager.begin.set()
    stepped.join()
    assert torch.equal(saves.staged()["w"], before)
    assert torch.equal(weight.detach(), before - 1)


def test_all_threads_that_wait_wait_until_the_tensors_are_copied(saves: Saves) -> None:
    saves.save(1, {"w": torch.rand(BIG)})
    threads = [threading.Thread(target=saves.states.wait_staged) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.1)
    assert [thread.is_alive() for thread in threads] == [True, True]
    saves.stager.begin.set()
    for thread in threads:
        thread.join()
    assert saves.submitted == [1]


def test_a_state_that_changed_too_early_is_not_saved_and_is_named(saves: Saves) -> None:
    state = {"layers": [{"w": torch.zeros(BIG)}], "other": torch.zeros(BIG)}
    saves.save(1, state)
    state["layers"][0]["w"].add_(1)  # type: ignore[index]
    with pytest.raises(ImageError, match=r"layers\[0\]\.w changed while overlapped staging"):
        saves.copied()
    assert not saves.spool.tickets()[0]
    assert not saves.submitted


def test_a_later_save_that_is_torn_does_not_stop_the_training(saves: Saves) -> None:
    weight = torch.zeros(BIG)
    saves.stager.begin.set()
    saves.save(1, {"w": weight}, overlap=False)
    saves.stager.begin.clear()
    saves.save(2, {"w": weight})
    weight.add_(1)
    saves.copied()
    assert "model of step 2" in saves.states.take_failures()[0]
    saves.save(3, {"w": weight})
    saves.states.wait_staged()
    assert saves.submitted == [1, 3]


@pytest.mark.parametrize("changed", [BIG, 64])  # of an operation that still runs, the first ones
def test_a_change_that_pytorch_does_not_count_is_found_by_a_sample(
    saves: Saves, changed: int
) -> None:
    weight = torch.zeros(BIG)
    count = weight._version
    saves.save(1, {"layers": [weight]})
    weight.numpy()[:changed] = 1  # as an operation on a DTensor changes its shard
    assert weight._version == count
    with pytest.raises(ImageError, match=r"layers\[0\] changed while overlapped staging"):
        saves.copied()


def test_samples_that_stay_on_their_device_tell_which_storage_has_changed() -> None:
    storages = [torch.zeros(BIG).untyped_storage() for _ in range(3)]
    before = sample_storages(storages)
    assert compare_rows(before, sample_storages(storages)) == [True, True, True]
    middle = torch.empty(0).set_(storages[1])[BIG // 2]
    middle += 1
    assert compare_rows(before, sample_storages(storages)) == [True, False, True]


@pytest.mark.parametrize("changed", [None, 0, 1])
def test_a_sample_tells_whether_an_image_has_what_is_on_a_gpu(changed: int | None) -> None:
    storages = [torch.arange(size).untyped_storage() for size in (3, BIG)]
    parts = [(64, storages[0]), (128, storages[1])]
    image = torch.zeros(128 + storages[1].nbytes(), dtype=torch.uint8)
    for offset, storage in parts:
        image[offset : offset + storage.nbytes()] = view_bytes(storage)
    if changed is not None:
        view_bytes(storages[changed]).add_(1)  # as by an optimizer
    assert has_samples(image, parts) is (changed is None)


def test_a_gpu_without_room_for_copies_costs_a_save_and_not_the_training(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves.stager.begin.set()
    saves.save(1, {"w": torch.ones(BIG)}, overlap=False)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.UntypedStorage, "clone", full)
    assert saves.save(2, {"small": torch.ones(3)}).components == ()
    assert saves.submitted == [1]
    (failure,) = saves.states.take_failures()
    assert "step 2, role actor, rank 0" in failure
    assert "no room" in failure


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL.keys())
def test_whatever_torch_saves_is_staged_while_training_goes_on(saves: Saves, make: Any) -> None:
    state = {"special": make(), "w": torch.randn(BIG)}
    expected = records_in(saved(state))
    saves.save(1, state)
    saves.copied()
    (sealed,) = saves.spool.tickets()[0]
    assert records_in(sealed.slot.read_bytes()[: sealed.ticket.nbytes]) == expected


def test_a_state_that_holds_itself_is_staged_and_watched(saves: Saves) -> None:
    state: dict[str, Any] = {"w": torch.randn(BIG), "list": []}
    state["me"] = state
    state["list"].append(state["list"])
    saves.save(1, state)
    saves.copied()
    assert torch.equal(saves.staged()["me"]["w"], state["w"])
    saves.stager.begin.clear()
    saves.save(2, state)
    state["w"].add_(1)
    saves.copied()
    assert ": w changed while" in saves.states.take_failures()[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_later_save_of_what_cannot_be_pickled_does_not_stop_the_training(
    saves: Saves, overlap: bool
) -> None:
    odd = {"w": torch.zeros(BIG), "groups": [{"f": threading.Lock()}]}
    saves.stager.begin.set()
    with pytest.raises(ImageError, match=r"step 1, role actor, rank 0.*model.*groups\[0\]\.f"):
        saves.save(1, odd, overlap)
    saves.save(2, {"w": torch.zeros(3)}, overlap=False)
    assert saves.save(3, odd, overlap).components == ()
    (failure,) = saves.states.take_failures()
    assert "step 3, role actor, rank 0" in failure
    assert "groups[0].f cannot be pickled, TypeError" in failure
    saves.save(4, {"w": torch.zeros(3)}, overlap)
    saves.states.wait_staged()
    assert saves.submitted == [2, 4]


def test_memory_that_is_freed_while_it_is_copied_costs_the_save_and_not_the_trainer(
    tmp_path: Path,
) -> None:
    script = """
        import mmap, os, sys, torch
        from pathlib import Path
        from trinity_sync.errors import ImageError
        from trinity_sync.tensors.memcpy import copy_into

        BYTES = 64 << 20  # malloc gives so much back to the system when it is freed
        storage = torch.ones(BYTES, dtype=torch.uint8).untyped_storage()
        file = os.open(Path(sys.argv[1]) / "slot", os.O_RDWR | os.O_CREAT)
        os.truncate(file, BYTES)
        image = torch.frombuffer(mmap.mmap(file, BYTES), dtype=torch.uint8)
        copy_into(image, [(0, BYTES)], [storage], file=file)
        assert image.all()

        def storages():
            yield storage
            storage.resize_(0)  # when its address was asked for

        try:
            copy_into(image, [(0, BYTES)], storages(), computed={}, file=file)
        except ImageError as error:
            sys.exit(0 if "freed while it was copied" in str(error) else 2)
        sys.exit(3)
    """
    Program(textwrap.dedent(script), tmp_path).end()


@pytest.mark.parametrize(("value", "nbytes"), [(1, 0), (0, 4 * BIG), (1, 64 << 20)])
def test_memory_that_is_freed_or_resized_too_early_is_named(
    tmp_path: Path, value: int, nbytes: int
) -> None:
    script = f"""
        import sys, torch
        from pathlib import Path
        from tests.unit.snapshot.test_overlap import Saves
        from trinity_sync.errors import ImageError

        saves = Saves(Path(sys.argv[1]))
        weight = torch.full((16 << 20,), {value}.0)
        saves.save(1, {{"layers": [weight]}})
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_({nbytes})
        try:
            saves.copied()
        except ImageError as error:
            sys.exit(0 if ": layers[0] changed while" in str(error) else 2)
        finally:
            saves.states.close()
        sys.exit(3)
    """
    Program(textwrap.dedent(script), tmp_path).end()


def test_the_check_finds_changes_that_pytorch_does_not_count(tmp_path: Path) -> None:
    saves = Saves(tmp_path, check=True)
    state = {"w": torch.zeros(BIG), "v": torch.zeros(BIG)}
    saves.save(1, state)
    state["v"].numpy()[7] = 1
    with pytest.raises(ImageError, match=r": v changed while"):
        saves.copied()
    saves.states.close()


def test_a_clean_end_stages_what_still_overlaps(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    saves.save(1, {"w": torch.zeros(BIG)})
    saves.stager.begin.set()
    saves.states.close()
    assert saves.submitted == [1]
