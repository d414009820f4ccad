"""Replicas under HSDP and FSDP2: the first saves for all, in files with the names of all."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.merged import merged_by_verl
from tests.integration.fsdp.models import Trained
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import copied, differences
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator
from trinity_sync.formats.hf_export import export_step
from trinity_sync.layout import step_folder
from trinity_sync.storage.verify import choose_files

STEP = 3
REPLICAS = ((0, 2), (1, 3))


def _save(
    tiny: Path, root: Path, scratch: Path, replicas: int, has_buffer: bool = False
) -> dict[str, Any]:
    """Save with our manager; return the components that this rank staged."""
    trained = Trained(tiny, 2, replicas=replicas)
    for _ in range(STEP):
        trained.step()
    if has_buffer:
        trained.model.register_buffer("mean_of_own_data", torch.full((1,), float(dist.get_rank())))
    torch.save(trained.state(), scratch / f"rank{dist.get_rank()}.pt")
    coordinator = coordinator_of(root)
    manager = trained.manager(coordinator)
    staged = manager.save_checkpoint(str(step_folder(root, STEP) / "actor"), STEP)
    again = manager.save_checkpoint(str(step_folder(root, STEP) / "actor"), STEP)
    sync = manager.save_state_dict(str(step_folder(root, STEP) / "actor"), STEP)
    manager.wait_on_save_thread()
    coordinator.close()
    return {"components": sorted(staged.components), "more": [again, sync]}


def _load(ours: bool, tiny: Path, root: Path, scratch: Path) -> dict[str, Any]:
    """Load into other ranks, with our manager or veRL's; return what is not as it was."""
    trained = Trained(tiny, 2, seed=1000, replicas=2)
    trained.step()
    manager = trained.manager() if ours else trained.verls_manager()
    manager.load_checkpoint(str(step_folder(root, STEP) / "actor"))
    expected = torch.load(scratch / f"rank{dist.get_rank()}.pt", weights_only=False)
    moments = [each["exp_avg"] for each in trained.optimizer.state.values()]
    assert all(isinstance(each, DTensor) for each in moments)
    # veRL's loader takes the mesh in the file, whose process groups are those of the first replica
    whole = [each.full_tensor().sum().item() for each in moments] if ours else []
    differing = differences(expected, trained.state())
    trained.step()
    return {"differing": differing, "whole": whole}


@pytest.fixture(scope="module")
def job(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Any]]:
    scratch = tmp_path_factory.mktemp("hsdp")
    root = scratch / "job"
    saved = on_ranks(_save, tiny, root, scratch, 2, scratch=scratch, world_size=4)
    return root, scratch, saved


def test_the_first_replica_saves_model_and_optimizer_in_one_file_with_all_names(
    job: tuple[Path, Path, list[Any]],
) -> None:
    root, _, saved = job
    own = ["extra_state", "metadata", "model", "optim"]
    components = [each["components"] for each in saved]
    assert components == [own, [own[0], *own[2:]], ["extra_state"], ["extra_state"]]
    assert [each["more"] for each in saved] == [[None, None]] * 4
    folder = step_folder(root, STEP) / "actor"
    for component in ("model", "optim", "extra_state"):
        inodes = [
            (folder / f"{component}_world_size_4_rank_{rank}.pt").stat().st_ino for rank in range(4)
        ]
        assert len({*inodes}) == (4 if component == "extra_state" else 2)
        if component != "extra_state":
            assert all(len({inodes[rank] for rank in ranks}) == 1 for ranks in REPLICAS)
    assert len(choose_files(root, step=STEP, newest=0)) > 12  # the manifest names all of them


def test_replicas_with_buffers_of_their_own_are_saved_by_each_rank(
    tiny: Path, tmp_path: Path
) -> None:
    given = tiny, tmp_path / "job", tmp_path, 2, True
    saved = on_ranks(_save, *given, scratch=tmp_path, world_size=4)
    assert all({"model", "optim"} <= {*each["components"]} for each in saved)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "veRLs"])
def test_each_rank_loads_the_files_of_its_name_bit_for_bit(
    ours: bool, job: tuple[Path, Path, list[Any]], tiny: Path, tmp_path: Path
) -> None:
    root, scratch, _ = job
    found = on_ranks(_load, ours, tiny, root, scratch, scratch=tmp_path, world_size=4)
    assert [each["differing"] for each in found] == [[]] * 4
    assert all(each["whole"] == found[0]["whole"] for each in found)


def test_verls_merger_and_ours_read_the_model(
    job: tuple[Path, Path, list[Any]], tmp_path: Path
) -> None:
    theirs = merged_by_verl(step_folder(job[0], STEP) / "actor", tmp_path)
    export_step(job[0], STEP, to=tmp_path / "ours", dtype="bf16")
    assert differences(theirs, load_file(tmp_path / "ours/model.safetensors")) == []


def _save_named(tiny: Path, root: Path, replicas: int) -> dict[str, Any]:
    """Save with a plain coordinator that names model and optimizer as replicated, and load."""
    trained = Trained(tiny, 2, replicas=replicas)
    trained.step()
    states = {
        "model": trained.model.state_dict(),
        "optim": trained.optimizer.state_dict(),
        "extra_state": {"rank": torch.tensor(dist.get_rank())},
    }
    with coordinator_of(root) as saves:
        staged = saves.save(4, states, replicated=("model", "optim"))
        sync = saves.save(4, {"model": states["model"]}, kind="state_dict")
        saves.wait_all()
        until(lambda: not saves.spool.tickets()[0], "the slots of the commit to be free")
    with CheckpointCoordinator.of_process_group(root, run_key="next") as saves:
        loaded = saves.load(4)
    moments = [each["exp_avg"] for each in loaded["optim"]["state"].values()]
    return {
        "whole": [each.full_tensor().sum().item() for each in moments],
        "components": sorted(staged.components),
        "sync": sync.components,
        "differing": differences(copied(states), copied(loaded)),
    }


@pytest.mark.parametrize(
    ("replicas", "staging"),
    [
        pytest.param(2, [0, 1], id="HSDP"),
        pytest.param(1, [0, 1, 2, 3], id="FSDP", marks=pytest.mark.slow),
        pytest.param(4, [0], id="DDP", marks=pytest.mark.slow),
    ],
)
def test_a_coordinator_saves_once_what_several_ranks_have_alike_and_all_shards(
    replicas: int, staging: list[int], tiny: Path, tmp_path: Path
) -> None:
    found = on_ranks(_save_named, tiny, tmp_path / "job", replicas, scratch=tmp_path, world_size=4)
    assert [rank for rank, each in enumerate(found) if "model" in each["components"]] == staging
    assert all(each["whole"] == found[0]["whole"] for each in found)
    assert [each["sync"] for each in found] == [()] * 4
    assert [each["differing"] for each in found] == [[]] * 4


def _save_on_mesh(root: Path) -> tuple[tuple[str, ...], list[float]]:
    """Save on a mesh whose first replica is not that of rank 0; return what was staged, and w."""
    mesh, rank = DeviceMesh("cpu", [[2, 3], [0, 1]]), dist.get_rank()
    own = torch.full((3,), float(rank % 2))
    weights = DTensor.from_local(own, mesh, [Replicate(), Shard(0)], run_check=False)
    states = {"model": {"w": weights}, "extra_state": {"rank": torch.tensor(rank)}}
    with coordinator_of(root) as saves:
        staged = saves.save(4, states, replicated=["model"])
        saves.wait_all()
    with CheckpointCoordinator.of_process_group(root, run_key="next") as saves:
        return staged.components, saves.load(4)["model"]["w"].to_local().tolist()


def test_the_first_replica_need_not_be_that_of_rank_0(tmp_path: Path) -> None:
    found = on_ranks(_save_on_mesh, tmp_path / "job", scratch=tmp_path, world_size=4)
    assert [rank for rank, (components, _) in enumerate(found) if "model" in components] == [2, 3]
    assert [w for _, w in found] == [[0.0] * 3, [1.0] * 3] * 2


def _load_beside_equal_meshes(root: Path) -> tuple[list[float], bool]:
    """Load in a process that has two equal meshes, of which its collector may know one alone."""
    meshes = []
    for collect in (gc.freeze, int) if dist.get_rank() else (gc.collect, gc.collect):
        meshes.append(init_device_mesh("cpu", (2, 2)))
        collect()
    weight = distribute_tensor(torch.arange(4.0), meshes[0], [Replicate(), Shard(0)])
    with coordinator_of(root) as saves:
        saves.save(2, {"model": {"w": weight}})
        saves.wait_all()
    with CheckpointCoordinator.of_process_group(root, run_key="next") as saves:
        loaded = saves.load(2)["model"]["w"]
    return loaded.full_tensor().tolist(), loaded.device_mesh.get_group(1) is meshes[1].get_group(1)


def test_what_is_loaded_beside_equal_meshes_is_on_the_same_one_on_all_ranks(tmp_path: Path) -> None:
    """As those of an actor and a reference: ranks would gather in different groups, for ever."""
    gathered = on_ranks(_load_beside_equal_meshes, tmp_path / "job", scratch=tmp_path, world_size=4)
    assert gathered == [([0.0, 1.0, 2.0, 3.0], True)] * 4
