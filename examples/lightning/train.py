"""Train with Lightning's `Trainer`, and resume in the middle of an epoch.

    pip install lightning torchdata
    python train.py          # kill it at any time and run it again
    trinity-sync ls ckpts

The callback saves every 25 steps. `StatefulDataLoader` saves its position in the epoch; a plain
`DataLoader` resumes as from Lightning's own checkpoints.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from trinity_sync.integrations.lightning import TrinitySyncCallback


class AutoEncoder(LightningModule):
    """Two layers that learn to repeat their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(512, 64), torch.nn.Linear(64, 512))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the mean squared error of a batch of shape (n, 512)."""
        loss = (self.layers(batch) - batch).pow(2).mean()
        if self.global_step % 25 == 0:
            print(f"step {self.global_step}: loss {loss:.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = StatefulDataLoader(torch.rand(25_600, 512), batch_size=128, shuffle=True)
    saves = TrinitySyncCallback("ckpts", every_n_steps=25)
    trainer = Trainer(max_steps=200, callbacks=[saves], logger=False, enable_progress_bar=False)
    # the newest committed step, if there is one; raises SaveFailedError if a save failed
    trainer.fit(AutoEncoder(), loader, ckpt_path="last")
