"""The callback for Hugging Face's Trainer: saved by steps, resumed bit-equal, failures raised."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.integration.fsdp.models import differences
from tests.trainers.local_saves import TOKENS, Fails, commit_here
from trinity_sync import ConfigError, SaveFailedError, WeightReader
from trinity_sync.integrations.huggingface import TrinitySyncCallback
from trinity_sync.layout import steps_on_disk


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


def hugging_face(
    folder: Path, saves: TrinitySyncCallback, stop: int = 99, **arguments: Any
) -> Trainer:
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
    one_thread: None, tmp_path: Path, spool_folder: Path
) -> None:
    whole = hugging_face(
        tmp_path / "out",
        TrinitySyncCallback(tmp_path / "whole", **commit_here(tmp_path, spool_folder)),
    )
    whole.train()
    root = tmp_path / "ckpts"
    hugging_face(
        tmp_path / "out", TrinitySyncCallback(root, **commit_here(tmp_path, spool_folder)), stop=11
    ).train()
    assert max(steps_on_disk(root)) == 10  # eight steps are an epoch
    assert list((tmp_path / "out").glob("checkpoint-*")) == []

    torch.manual_seed(99)
    saves = TrinitySyncCallback(root, **commit_here(tmp_path, spool_folder))
    resumed = hugging_face(tmp_path / "out", saves)
    resumed.train(resume_from_checkpoint=saves.latest())
    assert resumed.state.global_step == 12
    assert differences(state_of(whole), state_of(resumed)) == []


def test_a_hugging_face_trainer_that_has_nothing_to_resume_starts_afresh(
    tmp_path: Path, spool_folder: Path
) -> None:
    assert (
        TrinitySyncCallback(tmp_path / "ckpts", **commit_here(tmp_path, spool_folder)).latest()
        is None
    )


def test_a_hugging_face_training_ends_with_the_failure_of_a_save(
    tmp_path: Path, spool_folder: Path
) -> None:
    saves = TrinitySyncCallback(tmp_path / "ckpts", **commit_here(tmp_path, spool_folder, Fails()))
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
    tmp_path: Path, spool_folder: Path, asked: dict[str, Any], named: str
) -> None:
    saves = TrinitySyncCallback(tmp_path / "ckpts", **commit_here(tmp_path, spool_folder))
    trainer = hugging_face(tmp_path / "out", saves, **asked)
    with pytest.raises(ConfigError, match=f"does not save with {named}"):
        trainer.train()


class Unpicklable(torch.nn.Linear):
    """A module whose state cannot be staged."""

    def get_extra_state(self) -> Any:
        return lambda: 0

    def set_extra_state(self, state: Any) -> None:
        pass


def test_uploaded_weights_reach_a_reader_or_raise(
    tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    saves = TrinitySyncCallback(tmp_path / "ckpts", **commit_here(tmp_path, spool_folder))
    model, read = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    saves.upload(7, model)
    with WeightReader(root=saves.root, name="test") as reader:
        assert reader.load_into(read) == 7
    assert differences(model.state_dict(), read.state_dict()) == []
    with pytest.raises(SaveFailedError, match="lambda"):
        saves.upload(8, Unpicklable(3, 2))
    saves.on_train_end(None, None, None)
