"""The adapter that docs/how-to/adapter.md shows, below a library whose trainers call its hooks."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainers.local_saves import commit_here
from trinity_sync import Checkpoints, ConfigError
from trinity_sync.storage.runs import list_runs

PAGE = Path(__file__).parents[3] / "docs/how-to/adapter.md"
Fit = Callable[..., list[float]]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fit(
    process_group: None, tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Fit:
    """Train to a step with the adapter, from the newest step or another; return the losses."""
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    shown: dict[str, Any] = {}
    (module,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(module, PAGE, "exec"), shown)

    def run(
        until: int, resume_from: str = "newest", *, fails_at: int = -1, root: str = "ckpts"
    ) -> list[float]:
        here = commit_here(tmp_path, spool_folder)
        adapter = shown["TrinitySyncCallback"](tmp_path / root, every=2, **here)
        torch.manual_seed(1)
        random.seed(1)
        model = torch.nn.Linear(4, 1)
        trainer = SimpleNamespace(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            step=0,
            resume_from=resume_from,
        )
        error, losses = None, []
        adapter.start(trainer)
        try:
            while trainer.step < until:
                loss = model(torch.tensor([random.random() for _ in range(4)])).square().sum()
                trainer.optimizer.zero_grad()
                loss.backward()
                trainer.optimizer.step()
                trainer.step += 1
                losses.append(loss.item())
                adapter.end_step(trainer)
                if trainer.step == fails_at:
                    raise OSError("the dataset is gone")
        except OSError as raised:
            error = raised
        finally:
            adapter.end(trainer, error)
            here["trigger"].finish()
        return losses

    return run


def test_a_training_that_failed_continues_with_the_losses_of_one_that_did_not(
    fit: Fit, tmp_path: Path
) -> None:
    whole = fit(8, root="whole")
    assert fit(8, fails_at=5) == whole[:5]
    assert Checkpoints(tmp_path / "ckpts").steps() == [2, 4]
    assert fit(8) == whole[4:]
    assert Checkpoints(tmp_path / "ckpts").steps() == [2, 4, 6, 8]
    assert len(list_runs(tmp_path / "ckpts")) == 2


def test_a_training_continues_from_the_step_that_its_user_names(fit: Fit) -> None:
    losses = fit(4)
    assert fit(4, "global_step_2") == losses[2:]
    with pytest.raises(ConfigError, match="global_step_3 is no committed step"):
        fit(4, "global_step_3")
