"""What `test_lightning_hosts.py` runs, next to Lightning's own `ModelCheckpoint`."""

import copy
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.states import differences
from tests.trainers.lightning_training import (
    At,
    Pickled,
    Small,
    make_trainer,
    saving,
    state_of,
    stop,
)
from tests.trainers.local_saves import TOKENS, Taken, commit_taken
from trinity_sync.integrations.lightning import TrinitySyncCallback
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.manifest import read_manifest

EPOCH, AFTER_BATCH = 8, "on_train_batch_end"


class Plain(Small):
    """A model that draws no random numbers: `ModelCheckpoint` does not save their state."""

    def __init__(self, *, normalizes: bool = False) -> None:
        super().__init__()
        self.layers[1] = torch.nn.BatchNorm1d(8) if normalizes else torch.nn.Tanh()


def ema() -> Callback:
    return EMAWeightAveraging(decay=0.5)


def swa() -> Callback:
    return StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1)


AVERAGING: dict[str, Sequence[Callable[[], Callback]]] = {
    "none": [],
    "ema": [ema],
    "swa": [swa],
    "swa with batch norm": [swa],
}


def fit(
    callbacks: list[Callback], *, normalizes: bool = False, path: str | None = None, **given: Any
) -> tuple[Plain, LightningTrainer]:
    trainer = make_trainer(callbacks, devices=1, **given)
    module = Plain(normalizes=normalizes)
    trainer.fit(module, StatefulDataLoader(TOKENS, batch_size=4), ckpt_path=path)
    return module, trainer


def resume_what_has_ended(tmp_path: Path, spool: Path, averaging: str, ends: str) -> None:
    stopped = 3 * EPOCH if ends == "an epoch's end" else 2 * EPOCH + 3  # SWA has begun
    until = {"max_epochs": 4}
    first = {**until, **({"max_steps": stopped} if ends == "max_steps" else {})}

    def train(root: str, *others: Callback, **given: Any) -> Plain:
        saves = saving(tmp_path, spool, 5, root=root)
        averages = [make() for make in AVERAGING[averaging]]
        return fit([*averages, *others, saves], normalizes="norm" in averaging, **given)[0]

    whole = train("whole", **until)
    ended = train(
        "ckpts", *([] if ends == "max_steps" else [At(stopped, stop, AFTER_BATCH)]), **first
    )
    assert len(ended.seen) == steps_on_disk(tmp_path / "ckpts")[-1] == stopped
    resumed = train("ckpts", path="last", **until)
    assert resumed.seen == whole.seen[stopped:]
    assert resumed.losses == whole.losses[stopped:]
    assert differences(state_of(whole), state_of(resumed)) == []


KILLED_AT = 18
"""Step within the third epoch, when SWA has begun."""


def kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(make: Callable[[], Callback], save: Callable[[], Callback]) -> None:
    """Train in a process of its own, which is killed a step after a save."""

    def train() -> None:
        torch.set_num_threads(1)
        fit([make(), At(KILLED_AT + 1, kill, AFTER_BATCH), save()], max_epochs=4)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def resume_averaged_weights_after_a_kill(tmp_path: Path, spool: Path) -> None:
    averaging = {"ema": ema, "swa": swa}

    def save(name: str, trigger: Taken | None = None) -> TrinitySyncCallback:
        return saving(tmp_path, spool, 3, root=name, trigger=trigger)

    def host(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / f"{name}-host", every_n_train_steps=3)

    for name, make in averaging.items():  # before this process has threads
        train_until_killed(make, lambda name=name: save(name, Taken(KILLED_AT, tmp_path)))
        train_until_killed(make, lambda name=name: host(name))
        assert commit_taken(tmp_path) == [KILLED_AT]
        step = tmp_path / name / f"global_step_{KILLED_AT}"
        assert [path.name for path in (step / "attachments").iterdir()] == ["rng_state_0.pth"]
        assert len([*(step / "actor").glob("extra_state_*")]) == 1

    for name, make in averaging.items():
        whole, _ = fit([make()], max_epochs=4, enable_checkpointing=False)
        resumed, _ = fit([make(), save(name)], path="last", max_epochs=4)
        (path,) = map(str, (tmp_path / f"{name}-host").glob("*.ckpt"))
        by_host, _ = fit([make()], path=path, max_epochs=4, enable_checkpointing=False)
        for each in (resumed, by_host):
            assert each.seen == whole.seen[KILLED_AT:]
            assert differences(state_of(whole), state_of(each)) == []


def load_by_a_path_and_without_one(tmp_path: Path, spool: Path) -> None:
    whole, trainer = fit([saving(tmp_path, spool, 4, root="first")], max_steps=6)
    trained = copy.deepcopy(dict(whole.state_dict()))
    with torch.no_grad():
        whole.layers[0].weight.zero_()
    trainer.validate(dataloaders=TOKENS, verbose=False)
    assert differences(trained, dict(whole.state_dict())) == []

    other = saving(tmp_path, spool, 4, root="other", job={"keep": "last=1"})
    path = str(tmp_path / "first/global_step_4")
    resumed, _ = fit([other], path=path, max_steps=6)
    assert resumed.seen == whole.seen[4:]
    assert differences(trained, dict(resumed.state_dict())) == []
    assert steps_on_disk(tmp_path / "first") == [4, 6]
    assert read_manifest(tmp_path / "other", 6).run == 1


class Data(LightningDataModule):
    """Collates with a method, so its workers get the module and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.collated = "by a method"

    def collate(self, rows: list[torch.Tensor]) -> torch.Tensor:
        assert self.collated
        return torch.stack(rows)

    def train_dataloader(self) -> Any:
        return DataLoader(
            TOKENS,
            batch_size=4,
            num_workers=1,
            collate_fn=self.collate,
            multiprocessing_context="spawn",
        )


def train_with_spawned_workers(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"
    trainer = make_trainer([saving(tmp_path, spool, 4, trigger=Pickled())], max_steps=4)
    trainer.fit(Plain(), datamodule=Data())
    assert steps_on_disk(root) == [4]

    copied = copy.deepcopy(trainer)
    copied.save_checkpoint(tmp_path / "copied.ckpt")
    copied.save_checkpoint(root / "global_step_5")
    assert (root / "global_step_5").is_file()  # the copy's strategy has its own methods
