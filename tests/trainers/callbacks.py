"""Callbacks for others' trainers: saved by steps, resumed bit-equal, failures raised at the end.

Run by ``make trainers`` in a process of its own, and for that named unlike a file of tests: in a
process that has imported these trainers, FSDP2 cannot wrap a model any more (seen with Lightning
2.6, transformers 5.10 and torch 2.13; which of them does it is not known).
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.integration.fsdp.commits import CommitsHere
from tests.integration.fsdp.models import differences
from trinity_sync import ConfigError, SaveFailedError, Settings
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.integrations.huggingface import TrinitySyncCallback as ForTrainer
from trinity_sync.integrations.lightning import TrinitySyncCallback as ForLightning
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.manifest import read_manifest

TOKENS = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
Options = Callable[..., dict[str, Any]]


class Fails(CommitsHere):
    def submit(self, request: SaveRequest) -> None:
        self._failed[request.key] = "the disk is full"


@pytest.fixture
def options(tmp_path: Path, spool_folder: Path) -> Options:
    """How a callback commits without a server."""

    def make(trigger: CommitsHere | None = None) -> dict[str, Any]:
        settings = Settings(spool=spool_folder, home=tmp_path)
        return {"settings": settings, "trigger": trigger or CommitsHere()}

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class StopAt(TrainerCallback):
    """Ends the training, as a user does who presses a key."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


def hugging_face(folder: Path, saves: ForTrainer, stop: int = 99, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, bos_token_id=1, eos_token_id=1, n_positions=8, n_embd=16, n_layer=1, n_head=2
    )
    given = TrainingArguments(
        output_dir=str(folder),
        max_steps=12,
        per_device_train_batch_size=4,
        save_steps=2,
        save_total_limit=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=7,
        **arguments,
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    return Trainer(
        GPT2LMHeadModel(config), given, train_dataset=data, callbacks=[saves, StopAt(stop)]
    )


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }


def test_a_hugging_face_trainer_resumes_bit_equal_in_mid_epoch(
    one_thread: None, tmp_path: Path, options: Options
) -> None:
    whole = hugging_face(tmp_path / "out", ForTrainer(tmp_path / "whole", **options()))
    whole.train()
    root = tmp_path / "ckpts"
    hugging_face(tmp_path / "out", ForTrainer(root, **options()), stop=11).train()
    assert max(steps_on_disk(root)) == 10  # eight steps are an epoch
    assert list((tmp_path / "out").glob("checkpoint-*")) == []

    torch.manual_seed(99)
    saves = ForTrainer(root, **options())
    resumed = hugging_face(tmp_path / "out", saves)
    resumed.train(resume_from_checkpoint=saves.latest())
    assert resumed.state.global_step == 12
    assert differences(state_of(whole), state_of(resumed)) == []


def test_a_hugging_face_trainer_that_has_nothing_to_resume_starts_afresh(
    tmp_path: Path, options: Options
) -> None:
    assert ForTrainer(tmp_path / "ckpts", **options()).latest() is None


def test_a_hugging_face_training_ends_with_the_failure_of_a_save(
    tmp_path: Path, options: Options
) -> None:
    saves = ForTrainer(tmp_path / "ckpts", **options(Fails()))
    with pytest.raises(SaveFailedError, match="the disk is full"):
        hugging_face(tmp_path / "out", saves, stop=2).train()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"save_only_model": True}, "save_only_model"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best'"),
    ],
)
def test_what_the_callback_does_not_save_is_refused_before_training(
    tmp_path: Path, options: Options, asked: dict[str, Any], named: str
) -> None:
    saves = ForTrainer(tmp_path / "ckpts", **options())
    trainer = hugging_face(tmp_path / "out", saves, **asked)
    with pytest.raises(ConfigError, match=f"does not save with {named}"):
        trainer.train()


class Small(LightningModule):
    """A model whose training draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layers(batch.float()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def lightning(saves: ForLightning, *, steps: int, resume: bool = False) -> Small:
    module = Small()
    trainer = LightningTrainer(
        callbacks=[saves],
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(7)
    loader = StatefulDataLoader(TOKENS, batch_size=4, shuffle=True)
    trainer.fit(module, loader, ckpt_path=saves.latest() if resume else None)
    return module


def test_a_lightning_trainer_resumes_bit_equal_in_mid_epoch(
    one_thread: None, tmp_path: Path, options: Options
) -> None:
    whole = lightning(ForLightning(tmp_path / "whole", every_n_steps=2, **options()), steps=6)
    root = tmp_path / "ckpts"
    lightning(ForLightning(root, every_n_steps=2, **options()), steps=3)
    assert steps_on_disk(root) == [2, 3]
    assert read_manifest(root, 3) is not None

    torch.manual_seed(99)
    again = ForLightning(root, every_n_steps=2, keep=2, **options())
    resumed = lightning(again, steps=6, resume=True)
    assert resumed.seen == whole.seen[3:]
    assert differences(dict(whole.state_dict()), dict(resumed.state_dict())) == []
    last = [whole.optimizers(), resumed.optimizers()]
    states = [each.optimizer.state_dict() for each in last]
    assert differences(*states) == []


def test_a_lightning_training_ends_with_the_failure_of_a_save(
    tmp_path: Path, options: Options
) -> None:
    with pytest.raises(SaveFailedError, match="the disk is full"):
        lightning(ForLightning(tmp_path / "ckpts", every_n_steps=1, **options(Fails())), steps=1)
