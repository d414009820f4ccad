"""FSDP2 over tensor parallelism: what four ranks of a 2x2 mesh saved is read bit-equal."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import differences
from trinity_sync.errors import CommitError, WeightSyncError
from trinity_sync.formats.shard_reader import SavedState, outline_files
from trinity_sync.layout import shard_file
from trinity_sync.tensors.dtensors import ShardBox, make_whole_box
from trinity_sync.tensors.unshard import combine_tensor, plan_unshard

WORLD_SIZE = 4


def save_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(  # ten rows are five on each side of tp, and then three and two
        torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6), torch.nn.LayerNorm(7)
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    rank = dist.get_rank()
    torch.save(state, folder / shard_file("model", WORLD_SIZE, rank))
    whole = {name: value.full_tensor() for name, value in state.items()}
    summands = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()])
    torch.save({"w": summands}, folder / shard_file("optim", WORLD_SIZE, rank))
    own = DTensor.from_local(torch.tensor([1.0 + rank % 2]), mesh["dp"], [Shard(0)])
    torch.save({"w": own}, folder / shard_file("own", WORLD_SIZE, rank))
    torch.save({f"w{rank}": torch.ones(1)}, folder / shard_file("apart", WORLD_SIZE, rank))
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
        placed = {name: str(value.placements) for name, value in state.items()}
        assert "_StridedShard" in placed["0.weight"], placed
        assert state["3.weight"].device_mesh == mesh["dp"]  # a copy for each side of tp


def read_as_another_rank(folder: Path) -> None:
    """Two ranks, other than those of the mesh, read what four have saved."""
    whole = torch.load(folder / "whole.pt")
    model = SavedState(files(folder, "model"))
    found = {name: model.read_tensor(name, whole[name].dtype) for name in model.metas}
    assert differences(whole, found) == []
    read_nested(folder, "model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(save_shards, folder, scratch=folder, world_size=WORLD_SIZE)
    return folder


@pytest.fixture
def whole(saved: Path) -> dict[str, torch.Tensor]:
    return torch.load(saved / "whole.pt")


def files(folder: Path, component: str) -> list[Path]:
    return [folder / shard_file(component, WORLD_SIZE, rank) for rank in range(WORLD_SIZE)]


def read_nested(folder: Path, component: str) -> SavedState:
    """As a reshard reads it, which keeps the names."""
    paths = files(folder, component)
    return SavedState(paths, [*outline_files(paths, range(WORLD_SIZE)).values()])


def images(folder: Path, component: str) -> list[torch.Tensor]:
    return [
        torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for path in files(folder, component)
    ]


def test_weights_are_those_of_the_whole_model(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    shards = images(saved, "model")
    plan = plan_unshard([each.numpy().data for each in shards])
    read = {full.names[0]: combine_tensor(full, shards) for full in plan}
    assert differences(whole, read) == []


def test_a_reshard_reads_the_whole_model(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    model = read_nested(saved, "model")
    read = {name: torch.empty_like(whole[name]) for name in model.metas}
    for name, tensor in read.items():
        model.copy_box(name, make_whole_box(tensor.shape), tensor)
    assert differences(whole, read) == []


def test_a_box_across_the_files_of_several_ranks_is_read(
    saved: Path, whole: dict[str, torch.Tensor]
) -> None:
    box = torch.empty(4, 3, dtype=torch.float64)
    nbytes = read_nested(saved, "model").copy_box("0.weight", ShardBox((3, 2), (4, 3)), box)
    assert torch.equal(box, whole["0.weight"][3:7, 2:5].double())
    assert nbytes == 4 * 3 * 4


@pytest.mark.parametrize(
    ("component", "why"),
    [("optim", "w is placed as Partial"), ("own", "w differs between ranks 0 and 1")],
    ids=["summands", "parts on equal submeshes"],
)
def test_shards_that_are_no_parts_or_copies_are_refused_by_name(
    saved: Path, component: str, why: str
) -> None:
    with pytest.raises(WeightSyncError, match=why):
        plan_unshard([each.numpy().data for each in images(saved, component)])
    for read in (
        lambda: SavedState(files(saved, component)),
        lambda: read_nested(saved, component),
    ):
        with pytest.raises(
            CommitError, match=rf"{component}_world_size_4_rank_0.*{why}.*leave this"
        ):
            read()


def test_the_readers_of_files_ask_no_process_group(saved: Path) -> None:
    on_ranks(read_as_another_rank, saved, scratch=saved)


def test_tensors_that_rank_0_lacks_are_not_left_out(saved: Path) -> None:
    assert [*SavedState(files(saved, "apart")).metas] == ["w0", "w1", "w2", "w3"]
    with pytest.raises(CommitError, match=r"ranks 0 and 1 do not both have w0"):
        read_nested(saved, "apart")
