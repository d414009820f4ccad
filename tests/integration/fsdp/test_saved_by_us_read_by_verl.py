"""What a save wrote is read by veRL's own loader and merger, and is the state at the save."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.merged import merged, merged_by_verl
from tests.integration.fsdp.models import Trained
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import differences
from trinity_sync.formats.hf_export import export_step
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import require_committed

STEP = 3
EXPORTED_STEP = STEP + 1


@dataclass
class Saved:
    """A job in which one checkpoint was written slowly, while the training went on."""

    role_folder: Path
    expected: list[dict[str, Any]]
    """State of each rank at the moment of the save, by component."""
    exported: Path


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="FSDP1", marks=pytest.mark.slow), pytest.param(2, id="FSDP2")],
)
def fsdp(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def saved(fsdp: int, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    scratch = tmp_path_factory.mktemp("saved")
    root = scratch / "job"
    on_ranks(_train_and_save, fsdp, tiny, root, scratch, scratch=scratch)
    return Saved(
        role_folder=step_folder(root, STEP) / "actor",
        expected=[torch.load(scratch / f"rank{rank}.pt", weights_only=False) for rank in range(2)],
        exported=step_folder(root, EXPORTED_STEP) / "actor" / "huggingface",
    )


def _train_and_save(version: int, tiny: Path, root: Path, scratch: Path) -> None:
    """Save at a step, and train on while it is written."""
    # some hundred kilobytes then take a second, in which training goes on
    os.environ["TRINITY_SYNC_STACK__IO__MAX_MB_PER_S"] = "2"
    trained = Trained(tiny, version)
    for _ in range(STEP):
        trained.step()
    coordinator = coordinator_of(root)
    manager = trained.manager(coordinator)
    torch.save(trained.state(), scratch / f"rank{dist.get_rank()}.pt")
    manager.save_checkpoint(str(step_folder(root, STEP) / "actor"), STEP)
    for _ in range(5):
        trained.step()
    folder = step_folder(root, EXPORTED_STEP) / "actor"
    manager.save_checkpoint(str(folder), EXPORTED_STEP, save_as_hf=True)
    manager.wait_on_save_thread()
    coordinator.close()


def _load_with_verl(version: int, tiny: Path, folder: Path, expected: list[Any]) -> list[str]:
    """Load into differently initialised ranks; returns what is not as it was."""
    trained = Trained(tiny, version, seed=1000)
    trained.step()
    trained.verls_manager().load_checkpoint(str(folder))
    return differences(expected[dist.get_rank()], trained.state())


def test_verls_loader_restores_model_optimizer_and_extra_state_bit_for_bit(
    fsdp: int, saved: Saved, tiny: Path, tmp_path: Path
) -> None:
    found = on_ranks(
        _load_with_verl, fsdp, tiny, saved.role_folder, saved.expected, scratch=tmp_path
    )
    assert found == [[], []]


def test_verls_merger_restores_the_model_bit_for_bit(saved: Saved, tmp_path: Path) -> None:
    theirs = merged_by_verl(saved.role_folder, tmp_path)

    ours, ranks = merged(saved.role_folder), [expected["model"] for expected in saved.expected]
    assert differences({n: torch.cat([rank[n] for rank in ranks]) for n in ranks[0]}, ours) == []
    # the merger casts to bfloat16, whatever was trained
    assert differences({name: tensor.bfloat16() for name, tensor in ours.items()}, theirs) == []

    export_step(saved.role_folder.parents[1], STEP, to=tmp_path / "ours", dtype="bf16")
    assert differences(theirs, load_file(tmp_path / "ours/model.safetensors")) == []
    assert {path.name for path in (tmp_path / "ours").glob("*.json")} >= {
        path.name for path in tmp_path.glob("*.json") if path.name != "generation_config.json"
    }


def test_a_model_that_was_saved_as_hf_is_the_model_of_its_step(saved: Saved) -> None:
    manifest = require_committed(saved.exported.parents[2], EXPORTED_STEP)
    assert manifest.find_file("actor/huggingface/model.safetensors")
    exported = load_file(saved.exported / "model.safetensors")
    assert differences(merged(saved.exported.parent), exported) == []
