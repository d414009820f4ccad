"""What a user's program sets for its whole process does not change what is saved and loaded."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.job import Job
from tests.support.weights import VersionFile, upload
from tests.unit.formats.test_export import shards
from trinity_sync import WeightReader
from trinity_sync.errors import CommitError
from trinity_sync.formats.dcp import to_dcp
from trinity_sync.formats.shard_reader import SavedState
from trinity_sync.layout import step_folder
from trinity_sync.storage.restore import load_states

PACKAGE = Path(__file__).parents[3] / "trinity_sync"
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "zeros"),
}
"""Functions of torch whose tensors are on the default device, unless they are given another."""


def find_defaults(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of the calls that leave to the process what they depend on."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, named = ast.unparse(node.func), {each.arg for each in node.keywords}
        module, _, function = called.rpartition(".")
        if module != "torch":
            continue
        if function in FACTORIES and "device" not in named:
            yield node.lineno, called
        if function == "load" and not named >= {"weights_only", "map_location", "mmap"}:
            yield node.lineno, called


def test_no_call_of_torch_leaves_its_device_or_its_trust_to_the_process() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {called}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, called in find_defaults(path.read_text())
    ]
    assert not found
    assert [*find_defaults("torch.zeros(3)\ntorch.load(path, weights_only=True)")] == [
        (1, "torch.zeros"),
        (2, "torch.load"),
    ]


@pytest.fixture
def other_defaults() -> Iterator[None]:
    """Defaults with which a call that depends on them fails, or returns something else."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


STATE = {
    "w": torch.arange(5000, dtype=torch.float32),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "step": torch.tensor(7),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_readers_do_not_depend_on_the_default_device(
    job: Job, tmp_path: Path, other_defaults: None, dtype: torch.dtype | None
) -> None:
    versions = VersionFile(tmp_path / "version.json")
    versions.tell(upload(job, 1, STATE))
    expected = {n: t.to(dtype) if dtype and n != "step" else t for n, t in STATE.items()}
    with WeightReader(versions, name="reader", dtype=dtype) as reader:
        found = dict(reader.iter_weights())
        target = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        reader.load_into(target)
    for each in (found, target):
        assert all(torch.equal(each[name], tensor) for name, tensor in expected.items())


def test_loads_do_not_depend_on_the_default_device(
    job: Job, other_defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.commit_states(1, {"model": STATE})
    file = step_folder(job.root, 1) / "actor/model_world_size_1_rank_0.pt"
    for forced in ("0", "1"):
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", forced)
        for spool in (None, job.spool):
            loaded = load_states(job.root, 1, "actor", spool=spool)["model"]
            assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())
        model = SavedState([file])
        for name, tensor in STATE.items():
            assert torch.equal(model.read_tensor(name, tensor.dtype), tensor)


class Own:
    """An object of a user's class."""


def test_where_torch_may_unpickle_plain_values_only_others_are_refused_by_name(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.commit_states(1, {"model": {**STATE, "own": Own()}})
    assert isinstance(load_states(job.root, 1, "actor")["model"]["own"], Own)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CommitError, match=r"rank_0\.pt .*TORCH_FORCE_WEIGHTS_ONLY_LOAD is set"):
        load_states(job.root, 1, "actor")


def test_shards_are_put_together_whatever_the_default_device_is(
    job: Job, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    parts = shards({"w": STATE["w"].view(50, 100)}, (3,))
    job.world_size = len(parts)
    request.getfixturevalue("other_defaults")
    versions = VersionFile(tmp_path / "version.json")
    versions.tell(upload(job, 1, *parts))
    for rank, part in enumerate(parts):
        job.stage(1, {"model": part}, rank=rank)
    job.commit(1)
    with WeightReader(versions, name="reader") as reader:
        (found,) = dict(reader.iter_weights()).values()
    folder = step_folder(job.root, 1) / "actor"
    model = SavedState([folder / f"model_world_size_3_rank_{rank}.pt" for rank in range(3)])
    for each in (found, model.read_tensor("w", torch.float32)):
        assert torch.equal(each, STATE["w"].view(50, 100))


def test_conversions_do_not_depend_on_the_default_device(
    job: Job, tmp_path: Path, other_defaults: None
) -> None:
    job.commit_states(1, {"model": STATE})
    to_dcp(job.root, 1, tmp_path / "dcp")
    loaded = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in STATE.items()}
    with torch.device("cpu"):
        dcp.load({"model": loaded}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in STATE.items():
        assert torch.equal(loaded[name], tensor)
