"""A reader opens the newest version that is complete, from memory or from a commit."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.dying import end_of
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from tests.support.weights import VersionFile, upload, version_in
from tests.unit.conftest import Runs
from trinity_sync.errors import ImageError, WeightSyncError
from trinity_sync.fs.direct_io import digest_parts
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.manifest import read_manifest, write_manifest
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import list_leases
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.versions import ImageRef, Version

Publish = Callable[[int, Any], None]


def weights(step: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step)), "b": torch.full((3,), float(step))}


@pytest.fixture
def versions(tmp_path: Path) -> VersionFile:
    return VersionFile(tmp_path / "version.json")


@pytest.fixture
def reader(versions: VersionFile) -> WeightReader:
    return WeightReader(versions, name="test", timeout_s=0.1)


@pytest.fixture
def publish(job: Job, versions: VersionFile) -> Publish:
    """Uploads a state, and tells of its version."""
    return lambda step, state: versions.tell(upload(job, step, state))


def loaded(reader: WeightReader, version: Version | None = None) -> tuple[int, float]:
    """The step that the reader says it has, and the value that it has."""
    target = weights(-1)
    step = reader.load_into(target, version)
    (value,) = set(torch.cat([target["w"], target["b"]]).tolist())
    return step, value


def test_images_of_the_readers_node_are_read_in_place_also_by_views(
    publish: Publish, reader: WeightReader, job: Job, versions: VersionFile
) -> None:
    whole, tied = torch.randn(50, 20), torch.randn(7)
    publish(1, {"whole": whole, "one": tied, "other": tied})
    with reader.open() as view:
        found = dict(view.iter_views())
        assert [*found] == ["whole", "one", "other"]
        assert view.list_outlines() == [(n, tuple(t.shape), t.dtype) for n, t in found.items()]
        (image,) = view.images
        inside = range(image.data_ptr(), image.data_ptr() + len(image))
        assert all(tensor.data_ptr() in inside for tensor in found.values())
        assert torch.equal(found["whole"], whole)
        assert found["one"].data_ptr() == found["other"].data_ptr()
    near = WeightReader(NotAsked(versions.path, node="here"), name="explorer")
    for step in (2, 3):
        versions.tell(upload(job, step, weights(step)))
        assert loaded(near) == (step, step)


def test_a_tied_target_takes_no_version_whose_tensors_differ_or_are_a_part_of_it(
    publish: Publish, reader: WeightReader
) -> None:
    both = torch.zeros(4, 3)
    target = {"embedding": both, "head": both, "first rows": both[:2]}
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    publish(1, {"embedding": one, "head": other})
    with pytest.raises(WeightSyncError, match="head is not equal to embedding, to which"):
        reader.load_into(target)
    assert not both.any()
    publish(2, {"embedding": one, "head": one.clone()})
    reader.load_into(target)
    assert torch.equal(both, one)
    fused = torch.zeros(4, 3)
    publish(3, {"query": torch.ones(2, 3)})
    with pytest.raises(WeightSyncError, match="fused is not in the version"):
        reader.load_into({"query": fused[:2], "fused": fused})
    assert not fused.any()


def compiled(module: nn.Module) -> nn.Module:
    """What torch.compile returns, whose inner module is compiled at its first call."""
    return torch.compile(module)


def checkpointed(module: nn.Module) -> nn.Module:
    apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, nn.Linear))
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "DataParallel": nn.DataParallel,
    "both": lambda module: nn.DataParallel(compiled(module)),
    "activation checkpointing": checkpointed,
}


@pytest.mark.parametrize("trained", WRAPPERS)
@pytest.mark.parametrize("served", WRAPPERS)
def test_wrappers_of_torch_are_no_part_of_a_name(
    publish: Publish, reader: WeightReader, trained: str, served: str
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))

    plain, target = make(), make()
    publish(1, WRAPPERS[trained](plain).state_dict())
    reader.load_into(WRAPPERS[served](target))
    expected = {name.replace("_checkpoint_wrapped_module.", "") for name in plain.state_dict()}
    assert {name for name, _ in reader.iter_weights()} == expected
    for one, other in zip(plain.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_names_that_are_one_in_the_plain_model_are_refused(
    publish: Publish, reader: WeightReader
) -> None:
    publish(1, {"0.weight": torch.ones(2), "_orig_mod.0.weight": torch.ones(3)})
    with pytest.raises(WeightSyncError, match=r"0\.weight and _orig_mod\.0\.weight are one"):
        reader.load_into({"0.weight": torch.ones(2)})
    publish(2, {7: torch.ones(2)})
    with pytest.raises(WeightSyncError, match=r"7 is no name of a parameter"):
        reader.load_into({"0.weight": torch.ones(2)})


def test_a_tensor_on_a_part_of_the_ranks_is_read_from_theirs(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    """DTensors of a rank outside of their mesh have no part of them."""
    whole = torch.arange(12.0).reshape(6, 2)
    parts = whole[:3].clone(), whole[3:].clone(), torch.empty(0, 2)
    of_two = [make_dtensor(p, make_mesh("cpu", n, 2), whole.shape) for n, p in enumerate(parts)]
    job.world_size = 3
    versions.tell(upload(job, 1, *({"w": each, "norm": torch.ones(2)} for each in of_two)))
    reader.load_into(target := {"w": torch.zeros(6, 2), "norm": torch.zeros(2)})
    assert torch.equal(target["w"], whole)


@pytest.mark.parametrize("source", ["memory", "checkpoint"])
def test_a_float32_tensor_of_the_model_is_not_rounded_with_the_others(
    job: Job, versions: VersionFile, source: str
) -> None:
    """Router biases differ in digits that bfloat16 does not have."""
    close = torch.tensor([6.900, 6.901, 6.902, 6.903])
    versions = VersionFile(versions.path, node="there")
    with WeightReader(versions, name="r", dtype=torch.bfloat16) as reader:
        for step in (1, 2, 3):
            state = {"w": torch.full((5000,), step / 3), "bias": close * step}
            if source == "memory":
                version = upload(job, step, state)
            else:
                job.commit_states(step, {"model": state})
                version = Version(step, 1, "checkpoint", str(job.root), "actor", ())
            versions.tell(version)
            target = {"w": torch.ones(5000, dtype=torch.bfloat16), "bias": torch.ones(4)}
            reader.load_into(target)
            assert torch.equal(target["w"], state["w"].bfloat16())
            assert torch.equal(target["bias"], close * step)
            kept = dict(reader.iter_weights(keep_float32=["bias"]))
            assert torch.equal(kept["bias"], close * step)
        assert torch.equal(dict(reader.iter_weights())["bias"], (close * 3).bfloat16())


def test_a_reader_rounds_only_with_a_dtype(job: Job, versions: VersionFile) -> None:
    masters = {"w": torch.randn(5000)}
    versions.tell(upload(job, 1, masters))
    target = {"w": torch.zeros(5000).bfloat16()}
    with pytest.raises(
        WeightSyncError, match=r"float32 .* into torch.bfloat16 .*dtype="
    ) as refused:
        WeightReader(versions, name="explorer").load_into(target)
    assert "Nothing was loaded" in str(refused.value)
    WeightReader(versions, name="explorer", dtype=torch.bfloat16).load_into(target)
    assert torch.equal(target["w"], masters["w"].bfloat16())


class NotAsked(VersionFile):
    """Of whose images none is fetched."""

    def fetch_images(self, *asked: Any) -> list[Any]:
        raise AssertionError(asked)


def overwritten(job: Job, step: int) -> Version:
    """A version whose image is no longer in memory."""
    image = ImageRef("here", str(job.spool.folder / "removed"), "", 0, 1)
    return Version(step, 1, "memory", str(job.root), images=(image,))


def test_a_newer_version_replaces_an_overwritten_one(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    first, *_, last = [upload(job, step, weights(step)) for step in range(1, 5)]
    versions.tell(last)
    assert loaded(reader, first) == (4, 4)


def test_the_commit_replaces_an_overwritten_version(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    job.stage(3, {"model": weights(3)})
    version = upload(job, 3, None)
    versions.tell(version)
    job.commit(3)
    for step in (4, 5):  # not published
        upload(job, step, weights(step))
    with reader.open(version) as view:
        assert (view.version.step, view.version.source) == (3, "checkpoint")
        assert [lease.holder for lease in list_leases(job.root)] == ["test"]
    assert list_leases(job.root) == []
    assert loaded(reader) == (3, 3)


def test_a_commit_is_read_from_its_shards_next_to_weights_of_another_format(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    manifest = job.commit_states(3, {"model": weights(3)})
    (shard,) = (file for file in manifest.files if file.is_weights)
    other = replace(shard, path="actor/huggingface/model.safetensors")
    copy = job.root / "global_step_3" / other.path
    copy.parent.mkdir()
    copy.write_bytes((job.root / "global_step_3" / shard.path).read_bytes())
    write_manifest(job.root, replace(manifest, files=(*manifest.files, other)))
    versions.tell(overwritten(job, 3))
    assert loaded(reader) == (3, 3)


def test_a_first_read_takes_the_commit_before_a_version_that_went_with_its_trainer(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    job.commit_states(1, {"model": weights(1)})
    versions.tell(overwritten(job, 2))
    with pytest.raises(WeightSyncError, match="found no version that it can read"):
        loaded(reader, overwritten(job, 2))
    assert loaded(reader) == (1, 1)


def test_a_superseded_commit_does_not_replace_an_overwritten_version(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    open_run(job.root, "first", 0)
    for step in (10, 12):
        job.commit_states(step, {"model": weights(step)})
    open_run(job.root, "second", 10)
    versions.tell(overwritten(job, 10))
    assert loaded(reader) == (10, 10)


def test_a_commit_without_the_weights_of_the_role_does_not_replace_it_either(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    job.commit_states(1, {"model": weights(1)})
    job.roles = ("critic",)
    job.stage(2, {"model": weights(2)}, role="critic")
    job.commit(2)
    versions.tell(overwritten(job, 1))
    assert loaded(reader) == (1, 1)


def test_a_reader_never_has_parts_of_two_runs(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    """A later run commits a step again, leased or not, while a reader opens its files."""
    job.world_size = 2
    for run in (1, 2):
        open_run(job.root, str(run), 0)
        for rank in (0, 1):
            job.stage(1, {"model": weights(10 * run + rank)}, rank=rank, run=run)
        if run == 1:
            job.commit(1)
    versions.tell(Version(1, 2, "checkpoint", str(job.root)))
    second = job.root / "global_step_1/actor/model_world_size_2_rank_1.pt"
    with (
        when_opened(second, lambda: job.commit(1, run=2)),
        reader.open(Version(1, 1, "checkpoint", str(job.root))) as view,
    ):
        have = [digest_parts((memoryview(image.numpy()),)) for image in view.images]
    manifest = read_manifest(job.root, 1)
    assert (view.version.run, manifest.run) == (2, 2)
    assert have == [record.digest for record in manifest.files]


def test_an_open_version_outlasts_retention(job: Job, reader: WeightReader) -> None:
    def prune() -> list[int]:
        made = plan_prune(job.root, Rules(parse_policy("last=1"), parse_policy("last=1")), 0)
        return [each.step for each in prune_root(job.root, made).removed]

    for step in (1, 2):
        job.commit_states(step, {"model": weights(step)})
    with reader.open(Version(1, 1, "checkpoint", str(job.root))):
        (lease,) = list_leases(job.root)
        os.utime(lease.path, (0, lease.path.stat().st_mtime - 3600))  # an hour goes by
        assert prune() == []
        assert loaded(reader, Version(1, 1, "checkpoint", str(job.root))) == (1, 1)
    assert prune() == [1]


def test_an_older_version_is_never_read(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    job.commit_states(1, {"model": weights(1)})
    old = upload(job, 1, None)
    versions.tell(upload(job, 2, weights(2)))
    assert loaded(reader) == (2, 2)
    assert loaded(reader, old) == (2, 2)
    versions.tell(old)
    with pytest.raises(WeightSyncError, match="found no version that it can read"):
        loaded(reader)


def test_readers_read_on_after_the_trainer_was_killed(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    def upload_and_die() -> None:
        upload(job, 5, weights(5))
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(upload_and_die) == -signal.SIGKILL
    versions.tell(version_in(job.spool, job.root, 1, 5))
    assert loaded(reader) == (5, 5)


def test_a_committed_version_is_read_and_its_digests_are_compared_if_asked(
    job: Job, versions: VersionFile, reader: WeightReader
) -> None:
    job.commit_states(1, {"model": weights(1)})
    version = Version(1, 1, "checkpoint", str(job.root))
    careful = WeightReader(versions, name="careful", verify=True, timeout_s=0.1)
    assert loaded(reader, version) == loaded(careful, version) == (1, 1)
    path = job.root / "global_step_1/actor/model_world_size_1_rank_0.pt"
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(2).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match="is corrupted"):
        loaded(careful, version)
    with pytest.raises(WeightSyncError, match="no model of role critic"):
        loaded(reader, replace(version, role="critic"))


def test_what_is_read_instead_of_a_lost_runs_version_has_the_name_of_its_own_run(
    job: Job, reader: WeightReader
) -> None:
    open_run(job.root, "first", 0)
    job.commit_states(1, {"model": weights(1)})
    lost = Version(1, 1, "checkpoint", str(job.root), identity=job.identity, run_key="lost")
    assert loaded(reader, lost) == (1, 1)
    assert reader.version.run_key == "first"


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[torch.Tensor]:
    """A DTensor, on the only rank of its mesh."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield distribute_tensor(weights(-1)["w"], init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


def test_a_target_without_memory_for_every_element_is_refused_before_loading(
    publish: Publish, reader: WeightReader, sharded: torch.Tensor
) -> None:
    publish(1, weights(1))
    unfit = {
        r"w is a DTensor.*to_local\(\)": sharded,
        r"w is on the meta device.*to_empty\(device=\.\.\.\)": torch.empty(5000, device="meta"),
        "w is of the layout": weights(-1)["w"].to_sparse(),
        "w is expanded": torch.full((1,), -1.0).expand(5000),
    }
    for message, tensor in unfit.items():
        target = {"b": weights(-1)["b"], "w": tensor}
        with pytest.raises(WeightSyncError, match=message):
            reader.load_into(target)
        assert target["b"].tolist() == [-1.0] * 3


def test_any_target_with_memory_is_loaded_into(publish: Publish, reader: WeightReader) -> None:
    state = {"w": torch.arange(6000.0).reshape(60, 100), "t": torch.arange(8.0).reshape(2, 4)}
    publish(1, state)
    with torch.inference_mode():
        inference = {"w": torch.zeros(60, 100), "t": torch.zeros(4, 2).t()}
    parameters = {
        "w": torch.nn.Parameter(torch.zeros(60, 200)[:, ::2]),
        "t": torch.nn.Parameter(torch.zeros(4, 2).t()),
    }
    for target in (inference, parameters):
        reader.load_into(target)
        assert all(torch.equal(target[name], state[name]) for name in state)


def test_empty_tensors_are_not_taken_for_tied_ones(publish: Publish, reader: WeightReader) -> None:
    empty = {"indices": torch.empty(0, dtype=torch.int32), "bias": torch.empty(0)}
    publish(1, {**weights(1), **empty})
    target = {**weights(-1), **{name: tensor.clone() for name, tensor in empty.items()}}
    assert reader.load_into(target) == 1
    assert torch.equal(target["w"], weights(1)["w"])


def test_code_in_an_image_is_not_executed(
    publish: Publish, reader: WeightReader, tmp_path: Path
) -> None:
    publish(1, {"w": torch.ones(3), "evil": Runs(tmp_path / "ran")})
    with pytest.raises(ImageError, match="hold no weights that can be read"):
        loaded(reader)
    assert not (tmp_path / "ran").exists()


def test_a_reader_without_any_version_says_what_to_check(reader: WeightReader) -> None:
    with pytest.raises(WeightSyncError, match=r"nothing was published.*Does the trainer run"):
        reader.load_into({})
