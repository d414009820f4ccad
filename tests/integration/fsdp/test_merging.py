"""Steps of ranks are merged as a plain loop over full tensors does; what is not read is named."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.merged import merged
from tests.integration.fsdp.models import Trained, gathered
from tests.integration.fsdp.ranks import on_ranks
from tests.support.disk import flip_a_byte
from trinity_sync import Checkpoints
from trinity_sync.errors import CommitError
from trinity_sync.formats.hf_export import export_step
from trinity_sync.formats.merge import merge_steps
from trinity_sync.integrations.dcp import DcpSaver
from trinity_sync.layout import step_folder, steps_on_disk

STEPS, WEIGHTS = (1, 2, 3), (1, 2, 5)


def _train(version: int, tiny: Path, root: Path) -> None:
    trained = Trained(tiny, version)
    coordinator = coordinator_of(root)
    manager = trained.manager(coordinator)
    for step in STEPS:
        trained.step()
        manager.save_checkpoint(str(step_folder(root, step) / "actor"), step)
        manager.wait_on_save_thread()
    coordinator.close()


def _train_tensor_parallel(root: Path) -> None:
    """FSDP2 over tensor parallelism; the whole states, as PyTorch gathers them, go next to it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with coordinator_of(root) as saves:
        for step in STEPS:
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = gathered(dict(model.state_dict()))
            if dist.get_rank() == 0:
                torch.save(whole, root.parent / f"{step}.pt")
            saves.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})


def _save_by_dcp(root: Path) -> None:
    with coordinator_of(root) as saves:
        for step in STEPS:
            writer = DcpSaver(saves).writer(step)
            state = {"model": {"w": torch.full((8,), float(step))}}
            dcp.async_save(state, storage_writer=writer, async_stager=writer).result(60)  # type: ignore[union-attr]


def _require_mean(out: Path, sources: list[dict[str, torch.Tensor]]) -> None:
    """Compare the merge of `STEPS` with a mean in float64."""
    found = {name: torch.empty_like(tensor) for name, tensor in sources[0].items()}
    Checkpoints(out).load_into(STEPS[-1], found)
    for name, tensor in found.items():
        mean = torch.zeros(tensor.shape, dtype=torch.float64)
        for source, weight in zip(sources, WEIGHTS, strict=True):
            mean += source[name].double() * weight / sum(WEIGHTS)
        assert torch.equal(tensor, mean.float()), name
    assert any(not torch.equal(tensor, sources[-1][name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("version", "ranks"),
    [(1, 2), (2, 1), (2, 2), (2, 4)],
    ids=["FSDP1", "FSDP2 of 1", "FSDP2", "FSDP2 of 4"],
)
def test_a_merge_of_ranks_equals_a_mean_in_float64(
    version: int, ranks: int, tiny: Path, tmp_path: Path
) -> None:
    root, out = tmp_path / "job", tmp_path / "merges"
    on_ranks(_train, version, tiny, root, scratch=tmp_path, world_size=ranks)
    merge_steps(root, "last=3", out, weights=WEIGHTS)
    _require_mean(out, [merged(step_folder(root, step) / "actor") for step in STEPS])
    assert "model.safetensors" in export_step(out, 3).files


def test_a_merge_of_tensor_parallel_ranks_equals_a_mean_in_float64(tmp_path: Path) -> None:
    root, out = tmp_path / "job", tmp_path / "merges"
    on_ranks(_train_tensor_parallel, root, scratch=tmp_path, world_size=4)
    merge_steps(root, "last=3", out, weights=WEIGHTS)
    _require_mean(out, [torch.load(tmp_path / f"{step}.pt") for step in STEPS])
    shard = step_folder(root, 2) / "actor/model_world_size_4_rank_3.pt"
    flip_a_byte(shard, -2000)
    with pytest.raises(CommitError, match=f"{shard} is corrupted"):
        merge_steps(root, "last=3", tmp_path / "other")
    assert steps_on_disk(tmp_path / "other") == []


def test_steps_of_dcp_are_not_merged_and_what_reads_them_is_named(tmp_path: Path) -> None:
    root, out = tmp_path / "job", tmp_path / "merges"
    on_ranks(_save_by_dcp, root, scratch=tmp_path)
    with pytest.raises(CommitError, match=r"step 2 in .*dcp.async_save, load it by dcp.load"):
        merge_steps(root, "2,3", out)
    assert steps_on_disk(out) == []
