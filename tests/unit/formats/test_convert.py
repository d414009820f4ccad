"""Steps to and from checkpoints of PyTorch's Distributed Checkpoint, by one process."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.disk import flip_a_byte
from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync import Checkpoints, WeightReader
from trinity_sync.errors import CommitError, ConfigError, SaveError
from trinity_sync.formats.dcp import from_dcp, to_dcp
from trinity_sync.formats.dcp_source import DcpReader
from trinity_sync.formats.shard_reader import SavedState
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.restore import load_states
from trinity_sync.tensors.torch_private import make_dtensor, make_mesh

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


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


@pytest.fixture
def trained() -> Trained:
    return Trained()


@pytest.fixture
def checkpoint(trained: Trained, tmp_path: Path) -> Path:
    """What another program saved."""
    dcp.save(trained.states, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


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
        assert same(dict(reader.iter_weights()), {"w": torch.eye(3)})
    assert same(Checkpoints(job.root).load(STEP)["model"]["adjacency"].to_dense(), torch.eye(3))


def test_a_state_has_the_structure_that_it_was_saved_with(tmp_path: Path) -> None:
    extra = {"scale": torch.ones(2), "recipe": {"amax": [torch.zeros(1), torch.ones(1)]}, "n": 3}
    model = {"0.weight": torch.eye(2), "0._extra_state": extra, "0.none": None}
    dcp.save({"model": model}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    from_dcp(tmp_path / "theirs", tmp_path / "job", STEP, world_size=1)
    assert same(Checkpoints(tmp_path / "job").load(STEP)["model"], model)


@pytest.mark.parametrize("number", [np.float64(0.5), np.int64(3), np.bool_(True)])
def test_scalars_of_numpy_in_an_optimizer_are_converted_both_ways(
    job: Job, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any
) -> None:
    states = trained.states
    states["optim"]["param_groups"][0]["lr"] = number
    commit(job, states)
    to_dcp(job.root, STEP, tmp_path / "out")
    from_dcp(tmp_path / "out", tmp_path / "other", STEP, world_size=1)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    for root in (job.root, tmp_path / "other"):
        found = Checkpoints(root).load(STEP)["optim"]["param_groups"][0]["lr"]
        assert (found, type(found)) == (number, type(number))


def test_the_optimizer_alone_is_converted(job: Job, trained: Trained, tmp_path: Path) -> None:
    commit(job, trained.states)
    done = to_dcp(job.root, STEP, tmp_path / "out", components=["optim"])
    assert done.components == ("optim",)
    found = {"optim": trained.optim.state_dict()}
    emptied = torch.utils._pytree.tree_map(_emptied, found)
    dcp.load(emptied, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(emptied["optim"]["state"], found["optim"]["state"])


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
        assert same(found, views)
        into = {name: torch.zeros_like(plain).conj() for name in ("plain", "conj")}
        into["neg"] = torch.zeros_like(plain).conj().imag
        load(into)
        assert same(into, views)

    require_loaded(lambda to: dcp.load({"model": to}, checkpoint_id=tmp_path / "out", no_dist=True))
    require_loaded(lambda to: Checkpoints(job.root).load_into(STEP, to))
    with WeightReader(root=job.root, name="evaluation") as reader:
        assert same(dict(reader.iter_weights()), views)
        require_loaded(reader.load_into)


@pytest.mark.parametrize("world_size", [2, 7])
def test_there_and_back_is_the_same_bit_for_bit(
    job: Job, trained: Trained, tmp_path: Path, world_size: int
) -> None:
    states = trained.states
    states["model"]["nan"] = torch.tensor([float("nan"), -0.0])
    states["model"]["none"] = torch.empty(0, 3)
    states["model"]["half"] = torch.randn(3, 2).bfloat16().t()
    commit(job, states)
    to_dcp(job.root, STEP, tmp_path / "out")
    assert list_leases(job.root) == []
    other = tmp_path / "other"
    from_dcp(tmp_path / "out", other, STEP, world_size=world_size, whole=["*running*", "*num*"])
    assert require_committed(other, STEP) == find_newest(other)
    assert read_latest_pointer(other, "checkpoint") == STEP
    to_dcp(other, STEP, tmp_path / "again")
    first, second = ({"model": dict(states["model"]), "optim": states["optim"]} for _ in "12")
    first, second = (torch.utils._pytree.tree_map(_emptied, each) for each in (first, second))
    dcp.load(first, checkpoint_id=tmp_path / "out", no_dist=True)
    dcp.load(second, checkpoint_id=tmp_path / "again", no_dist=True)
    assert differing_bits(first, states) == differing_bits(second, states) == []


def _emptied(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def differing_bits(left: Any, right: Any, path: str = "") -> list[str]:
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [path]
        return [d for key in left for d in differing_bits(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
        return [] if left.dtype == right.dtype and torch.equal(*bits) else [path]
    return [] if same(left, right) else [path]


def test_shards_are_those_that_fully_shard_makes(checkpoint: Path, tmp_path: Path) -> None:
    manifest = from_dcp(
        checkpoint, tmp_path / "job", 1, world_size=2, whole=["1.*"], device_type="cpu"
    )
    assert {record.component for record in manifest.files} == {"model", "optim"}
    folder = step_folder(tmp_path / "job", 1) / "actor"
    first, second = (torch.load(folder / shard_file("model", 2, rank)) for rank in range(2))
    assert [part["0.weight"].to_local().shape[0] for part in (first, second)] == [3, 2]
    assert [part["2.weight"].to_local().shape[0] for part in (first, second)] == [1, 0]
    assert torch.equal(first["1.running_mean"], second["1.running_mean"])
    optim = torch.load(folder / shard_file("optim", 2, 0))
    assert str(optim["state"][0]["exp_avg"].placements[0]) == "S(0)"


def train_on(trained: Trained) -> dict[str, Any]:
    """A step of the training; plain tensors and DTensors could not be mixed in it."""
    trained.optim.zero_grad()
    trained.model(torch.ones(4, 3)).sum().backward()
    trained.optim.step()
    return trained.states


@pytest.mark.parametrize("form", ["plain", "by names", "in an object", "in an object, dotted"])
def test_a_model_without_fsdp_and_its_optimizer_load_what_was_imported_and_train_on(
    trained: Trained, tmp_path: Path, form: str
) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states, keys = trained.states, dict[str, Any]()
    if form != "plain":
        model, optim = get_state_dict(trained.model, trained.optim)
        states = {"model": model, "optimizer": optim}
    if "object" in form:
        states = {"app": {**states, "progress": {"step": 2}}}
    if "dotted" in form:
        keys = {"model": "app.model", "optim": "app.optimizer"}
    dcp.save(states, checkpoint_id=tmp_path / "theirs", no_dist=True)
    from_dcp(tmp_path / "theirs", tmp_path / "job", 1, world_size=1, **keys)
    fresh = Trained(seed=1)
    loaded = load_states(tmp_path / "job", 1, "actor")
    fresh.model.load_state_dict(loaded["model"])
    fresh.optim.load_state_dict(loaded["optim"])
    assert same(train_on(fresh), train_on(trained))


def test_replicas_are_written_once_and_each_rank_of_a_coordinator_loads_them(
    trained: Trained, checkpoint: Path, job: Job, coordinator_of: Open
) -> None:
    manifest = from_dcp(checkpoint, job.root, 1, world_size=2, layout="replicas")
    assert sum(record.component == "model" for record in manifest.files) == 1
    require_committed(job.root, 1)
    for rank in (1, 0):
        loaded = coordinator_of(rank, 2, run_key="later").load(1)
        fresh = Trained(seed=1)
        fresh.model.load_state_dict(loaded["model"])
        fresh.optim.load_state_dict(loaded["optim"])
        assert same(fresh.states, trained.states)
        assert loaded["extra_state"] == {}


def test_a_key_that_the_checkpoint_lacks_or_has_twice_is_named(
    trained: Trained, tmp_path: Path
) -> None:
    for key in ("a", "b"):
        dcp.save({key: trained.states}, checkpoint_id=tmp_path / key, no_dist=True)
    both = {"a": trained.states, "b": trained.states}
    dcp.save(both, checkpoint_id=tmp_path / "both", no_dist=True)
    with pytest.raises(ConfigError, match=r"no model under 'model' \(it has a.model, a.opt"):
        from_dcp(tmp_path / "both", tmp_path / "job", 1, world_size=1)
    with pytest.raises(ConfigError, match=r"no optim under 'adam' .*'' for none \(--optim\)"):
        from_dcp(tmp_path / "a", tmp_path / "job", 1, world_size=1, optim="adam")
    manifest = from_dcp(tmp_path / "both", tmp_path / "job", 1, world_size=1, model="b.model")
    assert [record.component for record in manifest.files] == ["model", "optim"]


def test_tensors_at_the_top_are_a_model(trained: Trained, tmp_path: Path) -> None:
    dcp.save(trained.model.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    manifest = from_dcp(tmp_path / "flat", tmp_path / "job", 1, world_size=1, model="")
    assert [record.component for record in manifest.files] == ["model"]


def test_small_files_join_the_step(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "small" / "huggingface").mkdir(parents=True)
    (tmp_path / "small" / "huggingface" / "config.json").write_text("{}")
    manifest = from_dcp(checkpoint, tmp_path / "job", 1, world_size=1, metadata=tmp_path / "small")
    assert manifest.find_file("actor/huggingface/config.json") is not None
    assert (step_folder(tmp_path / "job", 1) / "actor/huggingface/config.json").read_text() == "{}"


def test_a_step_that_exists_is_left_as_it_is(job: Job, trained: Trained, checkpoint: Path) -> None:
    before = commit(job, trained.states) / "manifest.json"
    text = before.read_text()
    with pytest.raises(CommitError, match="exists already"):
        from_dcp(checkpoint, job.root, STEP, world_size=2)
    assert before.read_text() == text


def test_a_step_joins_a_job_and_moves_its_pointer_only_forward(
    job: Job, trained: Trained, checkpoint: Path
) -> None:
    commit(job, trained.states)
    from_dcp(checkpoint, job.root, STEP - 1, world_size=1)
    assert read_latest_pointer(job.root, "checkpoint") == STEP
    from_dcp(checkpoint, job.root, STEP + 1, world_size=1)
    assert read_latest_pointer(job.root, "checkpoint") == STEP + 1


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no DCP checkpoint: it has no \.metadata"):
        from_dcp(tmp_path, tmp_path / "job", 1, world_size=1)
    (tmp_path / ".metadata").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not the index of a DCP checkpoint"):
        from_dcp(tmp_path, tmp_path / "job", 1, world_size=1)
    assert not (tmp_path / "job").exists()


class Runs:
    """A pickle that makes a file where it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_an_index_that_would_run_code_does_not(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="was not trusted"):
        from_dcp(checkpoint, tmp_path / "job", 1, world_size=1)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_would_run_code_does_not(trained: Trained, tmp_path: Path) -> None:
    states = trained.states
    states["model"]["trap"] = Runs(tmp_path / "ran")
    dcp.save(states, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(ConfigError, match=r"model\.trap of the checkpoint is more than tensors"):
        from_dcp(tmp_path / "theirs", tmp_path / "job", 1, world_size=1)
    assert not (tmp_path / "ran").exists()
    assert not step_folder(tmp_path / "job", 1).exists()


def test_an_index_that_python_3_13_wrote_is_read_on_every_python(checkpoint: Path) -> None:
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    content = pickle.dumps(index, protocol=2)  # which names classes in lines
    assert b"cpathlib" in content
    by_3_13 = re.sub(rb"cpathlib(\._local)?\nPosixPath", b"cpathlib._local\nPosixPath", content)
    (checkpoint / ".metadata").write_bytes(by_3_13)
    assert DcpReader(checkpoint).metadata.storage_meta.checkpoint_id == checkpoint


def test_an_index_that_leads_out_of_its_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = "../elsewhere.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match="outside of its folder"):
        from_dcp(checkpoint, tmp_path / "job", 1, world_size=1)


def test_a_checkpoint_that_lost_a_file_commits_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CommitError, match="corrupted or incomplete"):
        from_dcp(checkpoint, tmp_path / "job", 1, world_size=1)
    assert not step_folder(tmp_path / "job", 1).exists()


def test_a_corrupted_step_is_not_converted(job: Job, trained: Trained, tmp_path: Path) -> None:
    shard = commit(job, trained.states) / "actor" / shard_file("model", 1, 0)
    flip_a_byte(shard, -5000)
    with pytest.raises(CommitError, match="its digest is"):
        to_dcp(job.root, STEP, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpts"]


def test_a_folder_that_is_not_empty_is_unchanged(
    job: Job, trained: Trained, tmp_path: Path
) -> None:
    commit(job, trained.states)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        to_dcp(job.root, STEP, tmp_path / "out")
    with pytest.raises(ConfigError, match="part of the job"):
        to_dcp(job.root, STEP, job.root / "out")


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
    assert same(found["GG"][:1] + found["GG"][1][:1], [whole, whole])  # type: ignore[index,operator]


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


def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    job: Job, tmp_path: Path, small_disk: Path
) -> None:
    big = {"model": {"w": torch.zeros(2_000_000)}}
    commit(job, big)
    with pytest.raises(SaveError, match="No space left on device"):
        to_dcp(job.root, STEP, small_disk / "out")
    assert list(small_disk.iterdir()) == []
    to_dcp(job.root, STEP, tmp_path / "out")
    with pytest.raises(SaveError, match="No space left on device"):
        from_dcp(tmp_path / "out", small_disk / "job", 1, world_size=1)
    assert not step_folder(small_disk / "job", 1).exists()
