"""Weights of FSDP ranks reach a reader in shared memory, every parameter once and bit-equal."""

import functools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.integration.fsdp.commits import CommitsHere
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import copied, differences
from tests.support.weights import VersionFile, digest, version_in
from tests.support.without_ray import follower
from trinity_sync import CheckpointCoordinator, Settings, WeightReader, WeightSyncError
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state
from trinity_sync.snapshot.spool import open_job_spool

CASES: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {
    "FSDP1": (1, (2,), torch.float32),
    "FSDP2": (2, (2,), torch.float32),
    "FSDP1-replicated": (1, (1, 2), torch.bfloat16),
    "FSDP2-replicated": (2, (2, 1), torch.bfloat16),
}
STEPS = {case: step for step, case in enumerate(CASES, start=1)}


class Odd(torch.nn.Module):
    """Tied weights, sizes that no number of ranks divides, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 6)
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6, bias=False))
        self.single = torch.nn.Linear(6, 1)
        self.head = torch.nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens))
        return self.head(hidden) + self.single(hidden)


def _wrapped(version: int, mesh: tuple[int, ...], dtype: torch.dtype) -> Any:
    names = ("fsdp",) if len(mesh) == 1 else ("ddp", "fsdp")
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    module = _built(dtype)
    if version == 2:
        fully_shard(module.block, mesh=devices)
        return fully_shard(module, mesh=devices)
    hybrid = ShardingStrategy.HYBRID_SHARD if len(mesh) == 2 else ShardingStrategy.FULL_SHARD
    return FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Sequential}),
        device_id=torch.device("cpu"),
        device_mesh=devices,
        sharding_strategy=hybrid,
    )


def _built(dtype: torch.dtype) -> Odd:
    torch.manual_seed(0)
    return Odd().to(dtype)


def _upload_all(root: Path, spool: Path) -> list[str]:
    """Upload a model of each case, and die without closing anything."""
    coordinator = CheckpointCoordinator.of_process_group(
        root, settings=Settings(spool=spool, slots=4), trigger=CommitsHere()
    )
    for case, settings in CASES.items():
        model = _wrapped(*settings)
        published, _ = coordinator.upload(STEPS[case], functools.partial(get_model_state, model))
        assert published is not None
    dist.barrier()
    return [path.name for path in coordinator.spool.folder.iterdir()]


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Root and spool of two ranks that have uploaded every case and ended."""
    scratch = tmp_path_factory.mktemp("uploaded")
    with tempfile.TemporaryDirectory(prefix="trinity_sync-test-", dir="/dev/shm") as spool:
        (names, _) = on_ranks(_upload_all, scratch / "job", Path(spool), scratch=scratch)
        assert not any(name.endswith(".ticket") for name in names)
        yield scratch / "job", Path(spool)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_arrives_once_and_bit_equal(
    case: str, uploaded: tuple[Path, Path], tmp_path: Path
) -> None:
    root, spool = uploaded
    dtype = CASES[case][2]
    expected = _built(dtype).state_dict()
    version = version_in(open_job_spool(spool, root), root, 1, STEPS[case])
    assert len(version.images) == 2

    with WeightReader(VersionFile(tmp_path / "none"), name="test") as reader:
        arrived = list(reader.iter_weights(version))
        names = [*(name for name, _ in Odd().named_parameters()), "seen"]
        assert len(arrived) == len(names)
        assert differences({name: expected[name] for name in names}, dict(arrived)) == []
        with reader.open(version) as view:  # tied tensors under all of their names
            assert differences(dict(expected), dict(view.iter_views())) == []

        fresh = Odd().to(dtype)
        assert reader.load_into(fresh, version) == version.step
        assert differences(dict(expected), dict(fresh.state_dict())) == []
        assert fresh.head.weight is fresh.embed.weight


def test_the_shards_of_two_ranks_are_read_without_ray(uploaded: tuple[Path, Path]) -> None:
    root, spool = uploaded
    with follower(root, {**os.environ, "TRINITY_SYNC_SPOOL": str(spool)}) as explorer:
        explorer.wait()
        found = explorer.loaded()
    case, step = max(STEPS.items(), key=lambda item: item[1])
    expected = _built(CASES[case][2]).state_dict()
    del expected["head.weight"]  # tied to another
    assert found == [str(step), "1", "memory", digest(expected)]


def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    uploaded: tuple[Path, Path], tmp_path: Path
) -> None:
    root, spool = uploaded
    version = version_in(open_job_spool(spool, root), root, 1, STEPS["FSDP2"])
    target = Odd().state_dict()
    before = copied(dict(target))
    with WeightReader(VersionFile(tmp_path / "none"), name="test") as reader:
        with pytest.raises(
            WeightSyncError, match=r"extra is not in the version.*Nothing was loaded"
        ):
            reader.load_into({**target, "extra": torch.ones(1)}, version)
        with pytest.raises(WeightSyncError, match="seen is not in what it is loaded into"):
            reader.load_into({n: v for n, v in target.items() if n != "seen"}, version)
        with pytest.raises(WeightSyncError, match=r"single\.bias is .*, to be loaded into"):
            reader.load_into({**target, "single.bias": torch.ones(1).half()}, version)
        with pytest.raises(WeightSyncError, match=r"names images of 1 ranks, .* of rank 0 of 2"):
            reader.load_into(target, replace(version, images=version.images[:1]))
    assert differences(before, dict(target)) == []
