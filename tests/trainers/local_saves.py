"""Tokens to train on, and saves that are committed without a server."""

from pathlib import Path
from typing import Any

import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.support.job import mapped_nbytes
from trinity_sync import Settings
from trinity_sync.integrations.trainer_saves import TrainerSaves
from trinity_sync.saves.save_request import SaveRequest

TOKENS = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))


class Taken(CommitsHere):
    """From a step on, requests are taken as by a server whose worker has not started yet.

    The steps before are committed by then.
    """

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__()
        self.step, self.folder = step, folder

    def submit(self, request: SaveRequest) -> None:
        if request.step < self.step:
            super().submit(request)
        else:
            self.finish()
            (self.folder / f"{request.step}.request").write_text(request.model_dump_json())


def commit_taken(folder: Path) -> list[int]:
    """Commit what `Taken` has taken; the process that submitted it is gone. Return the steps."""
    worker, steps = CommitsHere(), []
    for path in sorted(folder.glob("*.request")):
        request = SaveRequest.model_validate_json(path.read_text())
        worker._save_step(request)
        steps.append(request.step)
        path.unlink()
    return steps


def mapped_sizes(saves: TrainerSaves | None) -> dict[str, int]:
    """Bytes of a rank's images of its first save, once what touches them has ended."""
    if not saves or not saves._coordinator:
        return {}
    coordinator = saves.coordinator
    coordinator._stager.memory.run(looks=False)
    names = ("dcp",) if saves.is_sharded else ("model", "optim")
    slots = {n: coordinator.spool.slot("actor", n, coordinator.rank, 0) for n in names}
    return {name: mapped_nbytes(slot) for name, slot in slots.items()}


def replace_files(step: Path, *patterns: str) -> None:
    """Give the names of a step's files to others, of the same sizes."""
    for path in [path for pattern in patterns for path in step.glob(pattern) if path.is_file()]:
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)


def make_gpt2(**sizes: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # which not all who import this have

    tiny = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**tiny | sizes, bos_token_id=1, eos_token_id=1))


def commit_here(home: Path, spool: Path, trigger: CommitsHere | None = None) -> dict[str, Any]:
    """Arguments of a callback whose saves need no server."""
    return {"settings": Settings(spool=spool, home=home), "trigger": trigger or CommitsHere()}
