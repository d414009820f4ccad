"""A step that was saved on one mesh is loaded on another: tensor and expert parallelism, HSDP.

Sizes are such that no mesh divides them. PyTorch's ``full_tensor`` gathers what is compared.
"""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint import fsdp_checkpoint_manager

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.models import gathered
from tests.integration.fsdp.ranks import Turns, on_ranks
from tests.support.models import configure
from tests.support.states import copied, differences
from tests.support.weights import VersionFile
from trinity_sync import ConfigError, WeightReader
from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations.verl import FSDPCheckpointManager
from trinity_sync.layout import step_folder
from trinity_sync.weights.versions import Version

STEP = 2

pytestmark = pytest.mark.slow  # four ranks save and load in turn

MESHES = {  # ranks of data parallelism, of tensor or expert parallelism
    "2x2": (2, 2),
    "4x1": (4, 1),
    "1x4": (1, 4),
    "hsdp": (2, 2),
    "experts": (2, 2),
    "4": (4,),
    "2": (2,),
    "1": (1,),
}
LOADS = [
    ("2x2", "2x2"),
    ("2x2", "4x1"),
    ("2x2", "1x4"),
    ("2x2", "4"),
    ("2x2", "2"),
    ("2x2", "1"),
    ("4", "2x2"),
    ("2", "2x2"),
    ("hsdp", "hsdp"),
    ("hsdp", "4"),
    ("hsdp", "2x2"),
    ("4", "hsdp"),
    ("experts", "experts"),
    ("experts", "4"),
    ("experts", "2"),
    ("2", "experts"),
]


class Mlp:
    """Model and optimizer of one rank on a mesh."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        sizes = {"inner": 11, "layers": 2, "heads": 1, "key_heads": 1}
        config = configure(Qwen2Config, 13, 6, tie_word_embeddings=False, **sizes)
        model = Qwen2ForCausalLM(config)
        shape = MESHES[layout]
        outer = "replicas" if layout == "hsdp" else "dp"
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=(outer, "inner")[: len(shape)])
        whole = mesh
        if len(shape) == 2 and layout != "hsdp":
            whole = mesh["dp"]
        if layout == "experts":  # on a mesh of their own, the rest on that of all ranks
            whole = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
            for layer in model.model.layers:
                for name, weight in [*layer.mlp.named_parameters()]:
                    sharded = distribute_tensor(weight.detach(), mesh["inner"], [Shard(0)])
                    layer.mlp.get_submodule(name.partition(".")[0]).weight = torch.nn.Parameter(
                        sharded
                    )
                fully_shard(layer.mlp, mesh=mesh["dp"])
        elif whole is not mesh:
            column, row = ColwiseParallel(), RowwiseParallel()
            plan = {"gate_proj": column, "up_proj": column, "down_proj": row}
            for layer in model.model.layers:
                parallelize_module(layer.mlp, mesh["inner"], plan)
        for layer in model.model.layers:
            fully_shard(layer, mesh=whole)
        self.model: Any = fully_shard(model, mesh=whole)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.25
        self.optimizer.step()

    def whole(self) -> dict[str, Any]:
        """Model and optimizer, gathered by PyTorch."""
        return dict(gathered(self.state()))

    def shards(self) -> dict[str, Any]:
        """A copy of model and optimizer of this rank."""
        return copied(self.state())

    def state(self) -> dict[str, Any]:
        return {"model": dict(self.model.state_dict()), "optim": self.optimizer.state_dict()}


def _manager(trained: Mlp, coordinator: Any = None, *, verls: bool = False) -> Any:
    contents = ["model", "optimizer", "extra"]
    config = CheckpointConfig(save_contents=contents, load_contents=contents)
    arguments = trained.model, trained.optimizer, None, None, config
    if verls:
        return fsdp_checkpoint_manager.FSDPCheckpointManager(*arguments)
    return FSDPCheckpointManager(*arguments, coordinator=coordinator)


def _save(layout: str, jobs: Path) -> None:
    """Save, and put the whole state next to it."""
    trained = Mlp(layout, seed=0)
    for _ in range(STEP):
        trained.step()
    coordinator = coordinator_of(jobs / layout)
    manager = _manager(trained, coordinator)
    manager.save_checkpoint(str(_folder(jobs, layout)), STEP)
    manager.wait_on_save_thread()
    whole = trained.whole()
    if dist.get_rank() == 0:
        torch.save(whole, jobs / f"{layout}.pt")
    coordinator.close()
    dist.barrier()


def _folder(jobs: Path, layout: str) -> Path:
    return step_folder(jobs / layout, STEP) / "actor"


def _load(saved: str, by: str, jobs: Path) -> dict[str, Any]:
    trained = Mlp(by, seed=1)
    messages: list[logging.LogRecord] = []
    log = logging.getLogger("trinity_sync.integrations.verl.fsdp.reshard")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = messages.append  # type: ignore[method-assign]
    log.addHandler(handler)
    _manager(trained).load_checkpoint(str(_folder(jobs, saved)))
    log.removeHandler(handler)
    differing = differences(torch.load(jobs / f"{saved}.pt"), trained.whole())
    before = copied(dict(trained.model.state_dict()))
    if saved == by:
        theirs = Mlp(by, seed=2)
        theirs.step()
        _manager(theirs, verls=True).load_checkpoint(str(_folder(jobs, saved)))
        differing += differences(trained.shards(), theirs.shards(), "by veRL's loader")
        theirs.step()
    trained.step()
    after = copied(dict(trained.model.state_dict()))
    if saved == by:
        differing += differences(trained.shards(), theirs.shards(), "after veRL's loader")
    return {
        "whole": differing,
        "trains": bool(differences(before, after)),
        "resharded": bool(messages),
    }


def _refuse(jobs: Path) -> str:
    """Save a weight of which each rank has several pieces."""
    trained = Mlp("2x2", seed=0)
    weight = trained.model.model.layers[1].mlp.up_proj.weight
    mesh, meta = weight.device_mesh, TensorMeta(weight.shape, weight.stride(), weight.dtype)
    pieces = DTensorSpec(mesh, (_StridedShard(0, split_factor=2), Replicate()), meta)
    state = {"up": DTensor(torch.zeros(6, 6), pieces, requires_grad=False)}
    manager = _manager(trained)
    trained.model.state_dict = lambda **_: state
    try:
        manager.save_checkpoint(str(step_folder(jobs / "refused", STEP) / "actor"), STEP)
    except ConfigError as error:
        return str(error)
    return ""


def _in_turn(jobs: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The same processes as four ranks, as two and as one; some sit out."""
    os.environ["TRINITY_SYNC_SPOOL"] = str(jobs / "spool")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    turns = Turns(jobs)

    def as_ranks(world_size: int, saves: list[str]) -> None:
        if turns.become(world_size):
            for layout in saves:
                _save(layout, jobs)
            for saved, by in LOADS:
                ready = (jobs / f"{saved}.pt").exists() and (saved, by) not in found
                if ready and torch.Size(MESHES[by]).numel() == world_size:
                    found[saved, by] = _load(saved, by, jobs)
        turns.become(4)

    as_ranks(2, ["2"])
    as_ranks(4, ["2x2", "4", "hsdp", "experts"])
    as_ranks(2, [])
    as_ranks(1, [])
    found["refused", ""] = {"error": _refuse(jobs)}
    return found


@pytest.fixture(scope="module")
def loaded(jobs: Path) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """What each rank found, by what was saved and what loaded it."""
    return on_ranks(_in_turn, jobs, scratch=jobs, world_size=4, timeout_s=250)


@pytest.mark.parametrize(("saved", "by"), LOADS, ids=lambda name: str(name))
def test_a_step_of_one_mesh_is_loaded_on_another_bit_for_bit(
    loaded: list[dict[tuple[str, str], dict[str, Any]]], saved: str, by: str
) -> None:
    found = [rank[saved, by] for rank in loaded if (saved, by) in rank]
    assert len(found) == torch.Size(MESHES[by]).numel()
    assert [rank["whole"] for rank in found] == [[]] * len(found)
    assert all(rank["trains"] for rank in found)
    assert found[0]["resharded"] == (saved != by)  # shards of the same mesh are loaded as they are


@pytest.mark.parametrize("layout", ["2x2", "hsdp", "experts"])
def test_weights_and_an_export_are_the_whole_model(
    loaded: Any, jobs: Path, tmp_path: Path, layout: str
) -> None:
    whole = torch.load(jobs / f"{layout}.pt")["model"]
    export_step(jobs / layout, STEP, to=tmp_path / "hf")
    assert differences(dict(whole), load_file(tmp_path / "hf/model.safetensors")) == []
    version = Version(STEP, 1, "checkpoint", str(jobs / layout), "actor")
    with WeightReader(VersionFile(tmp_path / "none"), name="test") as reader:
        assert differences(dict(whole), dict(reader.iter_weights(version))) == []


def test_a_weight_in_several_pieces_is_refused_by_name_before_it_is_saved(
    loaded: list[dict[tuple[str, str], dict[str, Any]]], jobs: Path
) -> None:
    for rank in loaded:
        assert "up is placed as (_StridedShard" in rank["refused", ""]["error"]
    assert not step_folder(jobs / "refused", STEP).exists()
