"""What W ranks saved is loaded by W' ranks: the same state, and the same losses from there on.

The reference is a run of W' ranks whose state was set by PyTorch from whole tensors, which the W
ranks had gathered: so no code of ours takes part in it.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.integration.fsdp.models import Trained, differences
from tests.integration.fsdp.ranks import on_ranks
from trinity_sync.layout import step_folder
from trinity_sync.storage.claims import leases

STEP = 3

SAVED = {  # version of FSDP, ranks, replicas
    "fsdp1-1": (1, 1, 1),
    "fsdp2-1": (2, 1, 1),
    "fsdp1-2": (1, 2, 1),
    "fsdp2-2": (2, 2, 1),
    "fsdp2-3": (2, 3, 1),
    "fsdp2-4": (2, 4, 1),
    "fsdp2-2x2": (2, 4, 2),
}


def save(names: list[str], tiny: Path, jobs: Path) -> None:
    """Train, save through the manager, and put the whole state beside it."""
    import torch.distributed as dist
    from verl.trainer.config import CheckpointConfig

    from tests.integration.fsdp.commits import CommitsHere
    from trinity_sync.coordinator import CheckpointCoordinator
    from trinity_sync.fsdp.manager import FSDPCheckpointManager
    from trinity_sync.settings import Settings

    for name in names:
        version, _, replicas = SAVED[name]
        trained = Trained(tiny, version, replicas=replicas)
        for _ in range(STEP):
            trained.step()
        coordinator = CheckpointCoordinator.of_process_group(
            jobs / name, settings=Settings(spool=jobs / "spool"), trigger=CommitsHere()
        )
        manager = FSDPCheckpointManager(
            trained.model,
            trained.optimizer,
            trained.schedule,
            trained.tokenizer,
            CheckpointConfig(),
            coordinator=coordinator,
        )
        manager.save_checkpoint(str(step_folder(coordinator.root, STEP) / "actor"), STEP)
        manager.wait_on_save_thread()
        whole = whole_state(trained)
        if dist.get_rank() == 0:
            torch.save(whole, jobs / f"{name}.pt")
        coordinator.close()
        dist.barrier()


def whole_state(trained: Trained) -> dict[str, Any]:
    """Model and optimizer as whole tensors, by name, gathered by PyTorch; on rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(trained.model, trained.optimizer, options=options)
    whole = {"model": model, "optim": optim, "lr_scheduler": trained.schedule.state_dict()}
    return dict(_gathered(whole))


def _gathered(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _gathered(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def load(names: list[str], version: int, tiny: Path, jobs: Path) -> dict[str, Any]:
    """Load each and go on, once through the manager and once through PyTorch."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from verl.trainer.config import CheckpointConfig

    from trinity_sync.fsdp.manager import FSDPCheckpointManager

    read: list[int] = []
    log = logging.getLogger("trinity_sync.fsdp.reshard")
    log.setLevel(logging.INFO)

    def note(record: logging.LogRecord) -> bool:
        if "bytes of" in record.getMessage():
            read.append(int(str(record.args[1]).replace(",", "")))  # type: ignore[index]
        return True

    log.addFilter(note)
    found: dict[str, Any] = {}
    for name in names:
        read.clear()
        ours = Trained(tiny, version, seed=1000)
        manager = FSDPCheckpointManager(
            ours.model,
            ours.optimizer,
            ours.schedule,
            ours.tokenizer,
            CheckpointConfig(),
        )
        manager.load_checkpoint(str(step_folder(jobs / name, STEP) / "actor"))
        random_state = torch.get_rng_state().numpy().tobytes()
        kept = sum(
            value.numel() * value.element_size()
            for value in _tensors({**ours.state(), "extra_state": None})
        )
        whole, gathered = torch.load(jobs / f"{name}.pt"), whole_state(ours)
        loaded = {"whole": differences(whole, gathered) if dist.get_rank() == 0 else []}
        theirs = Trained(tiny, version, seed=2000)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            theirs.model,
            theirs.optimizer,
            model_state_dict=whole["model"],
            optim_state_dict=whole["optim"],
            options=options,
        )
        theirs.schedule.load_state_dict(whole["lr_scheduler"])
        loaded["shards"] = [d for d in differences(theirs.state(), ours.state()) if "rng" not in d]
        losses = []
        for trained in (ours, theirs):
            torch.manual_seed(dist.get_rank())
            losses.append([trained.step() for _ in range(3)])
        found[name] = {
            **loaded,
            "losses": losses,
            "after": [d for d in differences(theirs.state(), ours.state()) if "rng" not in d],
            "kept": kept,
            "read": sum(read),
            "rng": random_state,
            "leases": leases(jobs / name),
        }
    return found


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, list):
        return [tensor for value in state for tensor in _tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


@pytest.fixture(scope="module")
def loaded(
    one_rank: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What each rank found, by what was saved and what loaded it."""
    jobs = tmp_path_factory.mktemp("jobs")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def note(by: str, ranks: list[dict[str, Any]]) -> None:
        for name in ranks[0]:
            found[name, by] = [rank[name] for rank in ranks]

    save(["fsdp1-1", "fsdp2-1"], tiny, jobs)
    two = on_ranks(_two_ranks, tiny, jobs, scratch=jobs, world_size=2)
    note("fsdp1-2", [rank[0] for rank in two])
    note("fsdp2-2", [rank[1] for rank in two])
    note("fsdp1-1", [load(["fsdp1-2"], 1, tiny, jobs)])
    on_ranks(save, ["fsdp2-4", "fsdp2-2x2"], tiny, jobs, scratch=jobs, world_size=4)
    note("fsdp2-3", on_ranks(_three_ranks, tiny, jobs, scratch=jobs, world_size=3))
    note("fsdp2-1", [load(["fsdp2-2", "fsdp2-3"], 2, tiny, jobs)])
    return found


def _two_ranks(tiny: Path, jobs: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    save(["fsdp1-2", "fsdp2-2"], tiny, jobs)
    return load(["fsdp1-1"], 1, tiny, jobs), load(["fsdp2-1"], 2, tiny, jobs)


def _three_ranks(tiny: Path, jobs: Path) -> dict[str, Any]:
    save(["fsdp2-3"], tiny, jobs)
    return load(["fsdp2-4", "fsdp2-2x2"], 2, tiny, jobs)


CASES = [
    ("fsdp1-1", "fsdp1-2"),
    ("fsdp1-2", "fsdp1-1"),
    ("fsdp2-1", "fsdp2-2"),
    ("fsdp2-2", "fsdp2-1"),
    ("fsdp2-4", "fsdp2-3"),
    ("fsdp2-2x2", "fsdp2-3"),
    ("fsdp2-3", "fsdp2-1"),
]


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_model_and_optimizer_are_the_saved_ones_bit_for_bit(
    loaded: dict[tuple[str, str], list[dict[str, Any]]], saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        assert rank["whole"] == []
        assert rank["shards"] == []


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_training_goes_on_as_in_a_run_that_had_the_state_all_along(
    loaded: dict[tuple[str, str], list[dict[str, Any]]], saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        ours, theirs = rank["losses"]
        assert ours == theirs
        assert rank["after"] == []


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_a_rank_reads_what_it_keeps_and_no_more(
    loaded: dict[tuple[str, str], list[dict[str, Any]]], saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        assert 0 < rank["read"] <= rank["kept"]


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_the_step_is_given_up_afterwards(
    loaded: dict[tuple[str, str], list[dict[str, Any]]], saved: str, by: str
) -> None:
    assert [rank["leases"] for rank in loaded[saved, by]] == [[]] * len(loaded[saved, by])
