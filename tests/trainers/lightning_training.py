"""What `test_lightning.py` runs, each in a process of its own, or on the ranks of one."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.fsdp.commits import CommitsHere, Fails
from tests.support.states import copied, differences
from tests.trainers.local_saves import (
    TOKENS,
    Taken,
    commit_here,
    commit_taken,
    mapped_sizes,
    replace_files,
)
from tests.trainers.ranks import kill_all_ranks, killed_ranks, on_ranks, require_same
from trinity_sync import ConfigError, SaveFailedError
from trinity_sync.integrations.lightning import TrinitySyncCallback
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.runs import list_runs

STEPS, KILLED_AT = 8, 6


def saving(
    folder: Path, spool: Path, every: int = 1, root: str = "ckpts", trigger: Any = None, **more: Any
) -> TrinitySyncCallback:
    arguments = commit_here(folder, spool, trigger)
    return TrinitySyncCallback(folder / root, every_n_steps=every, **arguments, **more)


def make_trainer(callbacks: list[Callback], **arguments: Any) -> LightningTrainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return LightningTrainer(callbacks=callbacks, accelerator="cpu", **quiet, **arguments)


class Small(LightningModule):
    """A model whose training draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.seen: list[list[float]] = []
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().tolist())
        loss = self.layers(batch.float()).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val:loss", self.layers(batch.float()).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Sharded(Small):
    def configure_model(self) -> None:
        if not isinstance(self.layers[0].weight, DTensor):
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def fit(
    module: Small,
    callbacks: list[Callback],
    *,
    steps: int,
    resume: bool | Path = False,
    **arguments: Any,
) -> Small:
    """Train a module, which then has its trainer."""
    trainer = make_trainer(callbacks, max_steps=steps, **{"devices": 1, **arguments})
    torch.manual_seed(7)
    # Lightning would wrap the sampler of shuffle=True for ranks, and its order would not be resumed
    order = DistributedSampler(TOKENS) if dist.is_initialized() else None
    size = 2 if order else 4  # eight steps are an epoch
    loader = StatefulDataLoader(TOKENS, batch_size=size, shuffle=order is None, sampler=order)
    trainer.fit(module, loader, ckpt_path="last" if resume is True else resume or None)
    return module


def state_of(module: Small) -> dict[str, Any]:
    optimizer: Any = module.optimizers()
    return copied({"model": dict(module.state_dict()), "optim": optimizer.optimizer.state_dict()})


def read_by_lightning(module: Small, file: Path, **arguments: Any) -> list[str]:
    """Have the trainer write its own checkpoint, and load it without our callback; return what
    differs from the module."""
    trainer = module.trainer
    trainer.save_checkpoint(file)
    arguments["default_root_dir"] = file.parent
    resumed = fit(Small(), [], steps=trainer.global_step, resume=file, **arguments)
    weights = dict(Small.load_from_checkpoint(file).state_dict())
    assert resumed.seen == []
    return [
        *differences(state_of(module), state_of(resumed)),
        *differences(dict(module.state_dict()), weights),
    ]


class At(Callback):
    """Calls a function with the trainer at a step, by default before a batch."""

    def __init__(
        self, step: int, call: Callable[[Any], None], event: str = "on_train_batch_start"
    ) -> None:
        self.step, self.call = step, call
        setattr(self, event, self.notice)

    def notice(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.call(trainer)


def stop(trainer: Any) -> None:
    trainer.should_stop = True


def look_at_the_first_step(
    folder: Path, spool: Path, module: type[Small] = Small, **arguments: Any
) -> dict[str, int]:
    saves, sizes = saving(folder, spool, 2), dict[str, int]()
    look = At(0, lambda _: sizes.update(mapped_sizes(saves._saves)))
    fit(module(), [saves, look], steps=2, **arguments)
    return sizes


def look_at_the_first_step_of_shards(folder: Path, spool: Path) -> dict[str, int]:
    ranks = {"strategy": ModelParallelStrategy(), "devices": 2}
    return look_at_the_first_step(folder, spool, Sharded, **ranks)


def touch_the_memory_of_the_first_save(folder: Path, spool: Path) -> None:
    for sizes in on_ranks(folder, look_at_the_first_step_of_shards, folder / "ranks", spool):
        assert sizes["dcp"]
    alone = look_at_the_first_step(folder, spool)
    assert alone["model"]
    assert alone["optim"]


def resume_bit_equal_in_mid_epoch(tmp_path: Path, spool: Path) -> None:
    whole = fit(Small(), [saving(tmp_path, spool, 2, root="whole")], steps=6)
    root = tmp_path / "ckpts"
    fit(Small(), [saving(tmp_path, spool, 2)], steps=3, resume=True)  # there is nothing to resume
    assert steps_on_disk(root) == [2, 3]
    assert read_manifest(root, 3) is not None

    torch.manual_seed(99)
    again = saving(tmp_path, spool, 2, keep=2)
    resumed = fit(Small(), [again], steps=6, resume=True)
    assert resumed.seen == whole.seen[3:]
    assert differences(state_of(whole), state_of(resumed)) == []
    assert read_by_lightning(resumed, tmp_path / "back.ckpt") == []

    read = Small()
    step = str(root / "global_step_6")
    resumed.trainer.validate(read, TOKENS, ckpt_path=step, verbose=False)
    assert differences(dict(whole.state_dict()), dict(read.state_dict())) == []


class StopInValidation(Callback):
    """Ends the training after a validation within an epoch, as `EarlyStopping` does."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= trainer.global_step == 3


def resume_what_a_validation_has_ended_within_an_epoch(tmp_path: Path, spool: Path) -> None:
    def train(root: str, *others: Callback) -> Small:
        trainer = make_trainer(
            [*others, saving(tmp_path, spool, 2, root=root)],
            max_epochs=2,
            val_check_interval=3,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(7)
        module = Small()
        loader = StatefulDataLoader(TOKENS, batch_size=4, shuffle=True)
        validation = torch.utils.data.DataLoader(TOKENS, batch_size=8)
        trainer.fit(module, loader, validation, ckpt_path="last")
        return module

    whole = train("whole")
    assert len(train("ckpts", StopInValidation()).seen) == 3
    assert steps_on_disk(tmp_path / "ckpts") == [2, 3]
    resumed = train("ckpts")
    assert resumed.trainer.current_epoch == 2
    assert resumed.seen[:5] == whole.seen[3:8]  # to the end of the epoch
    assert len(resumed.seen) == len(whole.seen) - 3


def train_two_steps(tmp_path: Path, spool: Path) -> list[float]:
    module = fit(Small(), [saving(tmp_path, spool, 2)], steps=2)
    return module.layers[2].weight.flatten().tolist()  # type: ignore[union-attr,no-any-return]


def validate_the_newest_step(tmp_path: Path, spool: Path) -> list[float]:
    module = Small()
    trainer = make_trainer([saving(tmp_path, spool, 2)], devices=1)
    trainer.validate(module, TOKENS, ckpt_path=str(tmp_path / "ckpts/global_step_2"), verbose=False)
    return module.layers[2].weight.flatten().tolist()  # type: ignore[union-attr,no-any-return]


def save_nothing_with_fast_dev_run(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"
    fit(Small(), [saving(tmp_path, spool)], steps=2)
    runs = list_runs(root)
    for resume in (False, True):
        saves = saving(tmp_path, spool)
        fit(Small(), [saves], steps=2, resume=resume, fast_dev_run=True)
        assert steps_on_disk(root) == [1, 2]
        assert list_runs(root) == runs

    resumed = fit(Small(), [saving(tmp_path, spool)], steps=3, resume=True)
    assert len(resumed.seen) == 1


def save_all_steps_of_a_second_fit(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"
    saves = saving(tmp_path, spool, 2)
    for run in (1, 2):
        fit(Small(), [saves], steps=2)
        assert read_manifest(root, 2).run == run


def resume_accumulated_gradients_bit_equal(tmp_path: Path, spool: Path) -> None:
    def train(root: str, steps: int, *callbacks: Callback) -> Small:
        saves = saving(tmp_path, spool, root=root)
        arguments = {"resume": True, "accumulate_grad_batches": 2}
        return fit(Small(), [*callbacks, saves], steps=steps, **arguments)

    whole = train("whole", 4)
    train("ckpts", 2)
    manifest = read_manifest(tmp_path / "ckpts", 2)
    assert len(train("ckpts", 4, At(2, stop, "on_train_batch_end")).seen) == 1
    assert read_manifest(tmp_path / "ckpts", 2) == manifest
    resumed = train("ckpts", 4)
    assert resumed.seen == whole.seen[4:]
    assert differences(state_of(whole), state_of(resumed)) == []


class OfSeveralSteps(Small):
    """A model of which a batch makes three steps, as of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for _ in range(3):
            self.optimizers().zero_grad()  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()  # type: ignore[union-attr]
        return torch.tensor(0.0)


def save_at_the_first_batch_beyond_each_interval(tmp_path: Path, spool: Path) -> None:
    def train(root: str, steps: int) -> Small:
        module = OfSeveralSteps()
        fit(module, [saving(tmp_path, spool, 5, root)], steps=steps, resume=True)
        return module

    whole = train("whole", 18)
    assert steps_on_disk(tmp_path / "whole") == [6, 12, 15, 18]
    train("ckpts", 9)
    assert steps_on_disk(tmp_path / "ckpts") == [6, 9]
    assert differences(state_of(whole), state_of(train("ckpts", 18))) == []
    assert steps_on_disk(tmp_path / "ckpts") == [6, 9, 12, 15, 18]


def go_on_from_checkpoints_of_lightning(tmp_path: Path, spool: Path) -> None:
    old = fit(Small(), [ModelCheckpoint(save_last=True)], steps=2, default_root_dir=tmp_path)
    found = tmp_path / "checkpoints/last.ckpt"
    assert old.trainer.checkpoint_callback.last_model_path == str(found)
    saves = saving(tmp_path, spool, 2)
    with pytest.warns(UserWarning, match=f'start once with ckpt_path="{tmp_path}/checkpoints/'):
        fit(Small(), [saves], steps=0, resume=True, default_root_dir=tmp_path)
    trainer = fit(Small(), [saves], steps=4, resume=found, default_root_dir=tmp_path).trainer
    assert (trainer.global_step, [*steps_on_disk(tmp_path / "ckpts")]) == (4, [4])
    with pytest.raises(ConfigError, match=r'step 2, .* has step 4: resume with ckpt_path="last"'):
        fit(Small(), [saves], steps=6, resume=found, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "back.ckpt")
    resumed = fit(Small(), [], steps=6, resume=tmp_path / "back.ckpt", default_root_dir=tmp_path)
    assert resumed.trainer.global_step == 6


def load_last_next_to_another_checkpoint(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"

    def train(steps: int, *, trinity: bool = True, **named: Any) -> int:
        """Return how many batches were trained on."""
        other = ModelCheckpoint(tmp_path / "other", save_last=True, every_n_train_steps=1)
        mine = [saving(tmp_path, spool)] if trinity else []
        return len(fit(Small(), [other, *mine], steps=steps, resume=True, **named).seen)

    assert train(2, trinity=False) == 2
    train(3, fast_dev_run=True)
    assert not root.exists()
    assert train(3) == 1  # the root has no step
    assert steps_on_disk(root) == [3]
    last = tmp_path / "other/last.ckpt"
    assert train(5, trinity=False) == 2
    os.utime(last, (time.time() + 60,) * 2)
    assert train(5) == 2


def interrupt(_: Any) -> None:
    raise RuntimeError("interrupted")


def resume_with_the_callback_of_an_exception(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"
    trigger = CommitsHere()
    saves = saving(tmp_path, spool, trigger=trigger)
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(Small(), [At(2, interrupt), saves], steps=4)
    trigger.finish()
    assert len(fit(Small(), [saves], steps=4, resume=True).seen) == 2
    assert [(run.number, run.resumed_from) for run in list_runs(root)] == [(1, 0), (2, 2)]


def fit_after_a_resume_that_trains_nothing(tmp_path: Path, spool: Path) -> None:
    saves = saving(tmp_path, spool)
    whole = fit(Small(), [saves], steps=2)
    assert fit(Small(), [saves], steps=2, resume=True).seen == []
    again = fit(Small(), [saves], steps=2)
    assert again.losses == whole.losses


class Pickled(CommitsHere):
    def __reduce__(self) -> Any:
        return Pickled, ()


def record_what_a_validation_logs(tmp_path: Path, spool: Path) -> None:
    root = tmp_path / "ckpts"
    trainer = make_trainer([saving(tmp_path, spool, 4)], max_steps=8, val_check_interval=4)
    measured = []

    class Measure(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                measured.append(trainer.callback_metrics["val:loss"].item())

    trainer.callbacks.insert(0, Measure())
    module = Small()
    loader = torch.utils.data.DataLoader(TOKENS, batch_size=4)
    trainer.fit(module, loader, loader)
    assert [read_metrics(root, 1, step) for step in (4, 8)] == [
        {"val_loss": each} for each in measured
    ]


# ------------------------------------------------------------ ranks


class Replaced(ModelParallelStrategy):
    """Loads a step whose files have been compared, and have other files' names since."""

    step: Path

    def load_checkpoint(self, *arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == 0:
            replace_files(self.step, "actor/*", "attachments/meta.pt")
        dist.barrier()
        return super().load_checkpoint(*arguments, **named)


def train(folder: Path, spool: Path, kind: str, root: str, fate: str) -> dict[str, Any]:
    """Train from the newest step, if there is one; killed, or to the end."""
    trigger = Taken(KILLED_AT, folder) if fate == "killed" else None
    saves = saving(folder, spool, 2, root=root, trigger=trigger)
    module, strategy = Small(), DDPStrategy()
    if kind == "fsdp":
        module = Sharded()
        strategy = Replaced(data_parallel_size=2, tensor_parallel_size=1)
        strategy.step = folder / root / f"global_step_{KILLED_AT}"
    torch.manual_seed(7)

    def draw(_: Any) -> None:
        torch.rand(dist.get_rank() + 1)  # each rank has its own dropout

    mine: list[Callback] = [At(0, draw, "on_train_start")] if fate != "resumed" else []
    mine += [At(KILLED_AT, lambda _: kill_all_ranks())] if fate == "killed" else []
    fit(module, [*mine, saves], steps=STEPS, resume=True, devices=2, strategy=strategy)
    assert isinstance(next(module.parameters()), DTensor) == (kind == "fsdp")
    random = torch.get_rng_state()
    if (kind, fate) == ("ddp", "resumed"):
        arguments = {"devices": 2, "strategy": DDPStrategy()}
        assert read_by_lightning(module, folder / "back.ckpt", **arguments) == []
    return {**state_of(module), "seen": module.seen, "losses": module.losses, "random": random}


def resume_bit_equal_after_a_kill(folder: Path, spool: Path, kind: str) -> None:
    whole = on_ranks(folder, train, folder, spool, kind, "whole", "whole")
    assert whole[0]["random"].tolist() != whole[1]["random"].tolist()
    killed_ranks(folder, train, folder, spool, kind, "ckpts", "killed")
    assert commit_taken(folder) == [KILLED_AT]
    resumed = on_ranks(folder, train, folder, spool, kind, "ckpts", "resumed")
    for before, after in zip(whole, resumed, strict=True):
        for name in ("seen", "losses"):
            before[name] = before[name][KILLED_AT:]
            assert len(before[name]) == STEPS - KILLED_AT
        require_same(before, after)


class NotSeenYet(TrinitySyncCallback):
    """Rank 1 does not see the root when Lightning selects a path."""

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        root = self._root
        self._root = root.parent / "elsewhere" if dist.get_rank() else root
        try:
            return super()._find_last_checkpoints(trainer)
        finally:
            self._root = root


def train_from_last(folder: Path, spool: Path, steps: int) -> int:
    """Return how many batches were trained on."""
    other = ModelCheckpoint(folder / "other", save_last=True, every_n_train_steps=1)
    saves = NotSeenYet(folder / "ckpts", every_n_steps=1, **commit_here(folder, spool))
    ranks = {"devices": 2, "strategy": DDPStrategy()}
    return len(fit(Small(), [other, saves], steps=steps, resume=True, **ranks).seen)


def agree_on_the_last_checkpoint(folder: Path, spool: Path) -> None:
    assert on_ranks(folder, train_from_last, folder, spool, 2) == [2, 2]
    assert on_ranks(folder, train_from_last, folder, spool, 3) == [1, 1]


def fail(folder: Path, spool: Path) -> None:
    mine = [saving(folder, spool, trigger=Fails())]
    with pytest.raises(SaveFailedError, match="the disk is full"):
        fit(Small(), mine, steps=1, devices=2, strategy=DDPStrategy())


def end_with_the_failure_on_all_ranks(folder: Path, spool: Path) -> None:
    on_ranks(folder, fail, folder, spool)


def refuse_strategies_by_name(folder: Path, spool: Path) -> None:
    class OnCpu(FSDPStrategy):
        """Lightning refuses the class itself without a GPU."""

    for strategy, told in (
        (OnCpu(), "does not save with OnCpu; take DDPStrategy, or ModelParallelStrategy"),
        (
            ModelParallelStrategy(1, 1, save_distributed_checkpoint=False),
            "leave out save_distributed_checkpoint=False",
        ),
    ):
        saves = TrinitySyncCallback(folder / "ckpts", every_n_steps=1)
        with pytest.raises(ConfigError, match=told):
            fit(Sharded(), [saves], steps=1, strategy=strategy)

    for refused in (DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy):
        strategy = object.__new__(refused)  # what they need is not installed
        saves = TrinitySyncCallback(folder / "ckpts", every_n_steps=1)
        with pytest.raises(ConfigError, match=f"does not save with {refused.__name__}"):
            saves.setup(SimpleNamespace(strategy=strategy), None, "fit")


class Moves(Small):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["weights"] = checkpoint.pop("state_dict")


def refuse_a_checkpoint_without_weights(tmp_path: Path, spool: Path) -> None:
    with pytest.raises(ConfigError, match="step 1: the checkpoint has no state_dict"):
        fit(Moves(), [saving(tmp_path, spool)], steps=1)


class Wide(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = torch.nn.Linear(8, 2)


class Deep(Small):
    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.layers.append(torch.nn.Linear(1, 1))
        self.strict_loading = strict


class Adds(Deep):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] |= {
            f"layers.3.{n}": t for n, t in Deep(True).layers[3].state_dict().items()
        }


def refuse_a_step_of_another_model_before_it_is_loaded(tmp_path: Path, spool: Path) -> None:
    saved = train_two_steps(tmp_path, spool)

    def resume(module: Small) -> None:
        fit(module, [saving(tmp_path, spool, 2)], steps=2, resume=True)

    for module, name in ((Wide(), "layers.2.bias"), (Deep(True), "layers.3.bias")):
        before = copied(dict(module.state_dict()))
        with pytest.raises(ConfigError, match=f"_2 holds another model: .* {name}, .*Nothing was"):
            resume(module)
        assert differences(before, dict(module.state_dict())) == []
    for fitting in (Deep(False), Adds(True)):  # whose optimizer then is another one
        with pytest.raises(ValueError, match="parameter group that doesn't match"):
            resume(fitting)
        assert fitting.layers[2].weight.flatten().tolist() == saved
