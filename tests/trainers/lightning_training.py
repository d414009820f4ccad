"""What `test_lightning.py` runs, each in a process of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.fsdp.models import differences
from tests.trainers.local_saves import TOKENS, Fails, commit_here
from trinity_sync import SaveFailedError
from trinity_sync.integrations.lightning import TrinitySyncCallback
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.manifest import read_manifest


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


def lightning(saves: TrinitySyncCallback, *, steps: int, resume: bool = False) -> Small:
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


def resume_bit_equal_in_mid_epoch(tmp_path: Path, spool: Path) -> None:
    torch.set_num_threads(1)
    whole = lightning(
        TrinitySyncCallback(tmp_path / "whole", every_n_steps=2, **commit_here(tmp_path, spool)),
        steps=6,
    )
    root = tmp_path / "ckpts"
    lightning(TrinitySyncCallback(root, every_n_steps=2, **commit_here(tmp_path, spool)), steps=3)
    assert steps_on_disk(root) == [2, 3]
    assert read_manifest(root, 3) is not None

    torch.manual_seed(99)
    again = TrinitySyncCallback(root, every_n_steps=2, keep=2, **commit_here(tmp_path, spool))
    resumed = lightning(again, steps=6, resume=True)
    assert resumed.seen == whole.seen[3:]
    assert differences(dict(whole.state_dict()), dict(resumed.state_dict())) == []
    last = [whole.optimizers(), resumed.optimizers()]
    states = [each.optimizer.state_dict() for each in last]
    assert differences(*states) == []


def end_with_the_failure_of_a_save(tmp_path: Path, spool: Path) -> None:
    with pytest.raises(SaveFailedError, match="the disk is full"):
        lightning(
            TrinitySyncCallback(
                tmp_path / "ckpts", every_n_steps=1, **commit_here(tmp_path, spool, Fails())
            ),
            steps=1,
        )
