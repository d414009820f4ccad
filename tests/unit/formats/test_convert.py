"""Steps to checkpoints of PyTorch's Distributed Checkpoint, by one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.disk import flip_a_byte
from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.job import Job
from tests.support.states import differences
from trinity_sync import Checkpoints, WeightReader
from trinity_sync.errors import CommitError, ConfigError, SaveError
from trinity_sync.formats.dcp import to_dcp
from trinity_sync.formats.shard_reader import SavedState
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.storage.steps_in_use import list_leases

STEP = 40


class Trained:
    """A small model and its optimizer after two steps."""

    def __init__(self, seed: int = 0, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for _ in range(steps):
            self.model(torch.randn(4, 3)).sum().backward()
            self.optim.step()

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}


@pytest.fixture
def trained() -> Trained:
    return Trained()


def commit(job: Job, states: dict[str, Any], step: int = STEP) -> Path:
    job.commit_states(step, states)
    return step_folder(job.root, step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_a_tensor_that_is_not_strided_is_named(job: Job, tmp_path: Path, form: str) -> None:
    model = {"w": torch.eye(3), "adjacency": getattr(torch.eye(3), form)()}
    folder = commit(job, {"model": model})
    with pytest.raises(CommitError, match=r"/actor/model_.* \(adjacency is sparse") as refused:
        to_dcp(job.root, STEP, tmp_path / "out")
    assert str(folder) in str(refused.value)
    with pytest.raises(CommitError, match=r"/actor/model_.* \(adjacency is sparse"):
        SavedState([*folder.glob("actor/model*")])
    with WeightReader(root=job.root, name="evaluation") as reader:
        assert differences(dict(reader.iter_weights()), {"w": torch.eye(3)}) == []
    assert (
        differences(Checkpoints(job.root).load(STEP)["model"]["adjacency"].to_dense(), torch.eye(3))
        == []
    )


@pytest.mark.parametrize("number", [np.float64(0.5), np.int64(3), np.bool_(True)])
def test_scalars_of_numpy_in_an_optimizer_are_converted(
    job: Job, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any
) -> None:
    states = trained.states
    states["optim"]["param_groups"][0]["lr"] = number
    commit(job, states)
    to_dcp(job.root, STEP, tmp_path / "out")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    found = Checkpoints(job.root).load(STEP)["optim"]["param_groups"][0]["lr"]
    assert (found, type(found)) == (number, type(number))


def test_conjugate_and_negative_views_have_the_same_values_everywhere(
    job: Job, tmp_path: Path
) -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    views = {"plain": plain, "conj": plain.clone().conj(), "neg": plain.clone().conj().imag}
    commit(job, {"model": views})
    to_dcp(job.root, STEP, tmp_path / "out")

    def require_loaded(load: Callable[[dict[str, torch.Tensor]], object]) -> None:
        found = {name: torch.zeros_like(value) for name, value in views.items()}
        load(found)
        assert differences(found, views) == []
        into = {name: torch.zeros_like(plain).conj() for name in ("plain", "conj")}
        into["neg"] = torch.zeros_like(plain).conj().imag
        load(into)
        assert differences(into, views) == []

    require_loaded(lambda to: dcp.load({"model": to}, checkpoint_id=tmp_path / "out", no_dist=True))
    require_loaded(lambda to: Checkpoints(job.root).load_into(STEP, to))
    with WeightReader(root=job.root, name="evaluation") as reader:
        assert differences(dict(reader.iter_weights()), views) == []
        require_loaded(reader.load_into)


def test_what_was_converted_is_the_same_bit_for_bit(
    job: Job, trained: Trained, tmp_path: Path
) -> None:
    states = trained.states
    states["model"]["nan"] = torch.tensor([float("nan"), -0.0])
    states["model"]["none"] = torch.empty(0, 3)
    states["model"]["half"] = torch.randn(3, 2).bfloat16().t()
    commit(job, states)
    to_dcp(job.root, STEP, tmp_path / "out")
    assert list_leases(job.root) == []
    plain = {"model": dict(states["model"]), "optim": states["optim"]}
    loaded = torch.utils._pytree.tree_map(_emptied, plain)
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert differences(loaded, states) == []
    done = to_dcp(job.root, STEP, tmp_path / "alone", components=["optim"])
    assert done.components == ("optim",)
    loaded = torch.utils._pytree.tree_map(_emptied, {"optim": states["optim"]})
    dcp.load(loaded, checkpoint_id=tmp_path / "alone", no_dist=True)
    assert differences(loaded["optim"], states["optim"]) == []


def _emptied(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def test_a_corrupted_step_is_not_converted_nor_one_into_a_folder_that_is_not_empty(
    job: Job, trained: Trained, tmp_path: Path
) -> None:
    commit(job, trained.states)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        to_dcp(job.root, STEP, tmp_path / "out")
    with pytest.raises(ConfigError, match="part of the job"):
        to_dcp(job.root, STEP, job.root / "out")
    flip_a_byte(step_folder(job.root, STEP) / "actor" / shard_file("model", 1, 0), -5000)
    with pytest.raises(CommitError, match="its digest is"):
        to_dcp(job.root, STEP, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpts", "out"]


def commit_of_two(job: Job, optims: list[Any]) -> None:
    job.world_size = 2
    for rank, state in enumerate(optims):
        job.stage(STEP, {"model": {"w": torch.ones(1)}, "optim": {"state": {0: state}}}, rank=rank)
    job.commit(STEP, "model", "optim")


def test_a_list_has_the_shards_of_all_ranks(job: Job, tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)

    def of(rank: int) -> Any:
        shard = whole[2 * rank :][:2].clone()
        return make_dtensor(shard, make_mesh("cpu", rank, 2), whole.shape)

    commit_of_two(job, [{"GG": [of(n), [of(n), 7]], "betas": (0.5, 0.9)} for n in range(2)])
    to_dcp(job.root, STEP, tmp_path / "out")
    found = {"GG": [torch.zeros(4, 3), [torch.zeros(4, 3), 0]], "betas": (0.0, 0.0)}
    dcp.load({"optim": {"state": {0: found}}}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert differences(found["GG"][:1] + found["GG"][1][:1], [whole, whole]) == []  # type: ignore[index,operator]


@pytest.mark.parametrize("container", [list, tuple, None])
def test_ranks_that_hold_unlike_plain_tensors_are_refused(
    job: Job, tmp_path: Path, container: type | None
) -> None:
    own = [torch.full((2,), float(n)) for n in range(2)]
    commit_of_two(job, [{"GG": container([each]) if container else each} for each in own])
    with pytest.raises(CommitError, match=r"state.0.GG(.0)? differs between ranks 0 and 1"):
        to_dcp(job.root, STEP, tmp_path / "out")


def test_shards_in_a_tuple_are_refused(job: Job, tmp_path: Path) -> None:
    meshes = [make_mesh("cpu", rank, 2) for rank in range(2)]
    commit_of_two(
        job, [{"GG": (make_dtensor(torch.ones(1), mesh, torch.Size([2])),)} for mesh in meshes]
    )
    with pytest.raises(CommitError, match=r"state.0.GG.0 is a DTensor in a tuple"):
        to_dcp(job.root, STEP, tmp_path / "out")


def test_a_full_disk_is_a_sentence_and_leaves_nothing(job: Job, small_disk: Path) -> None:
    commit(job, {"model": {"w": torch.zeros(2_000_000)}})
    with pytest.raises(SaveError, match="No space left on device"):
        to_dcp(job.root, STEP, small_disk / "out")
    assert list(small_disk.iterdir()) == []
