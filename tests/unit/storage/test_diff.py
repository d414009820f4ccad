"""Which tensors changed between two steps, and by how much."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.job import Job
from tests.support.meanwhile import when_opened
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.storage.diff import PIECE, TensorChange, diff
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.manifest import read_manifest, write_manifest
from trinity_sync.storage.runs import open_run


def commit(job: Job, step: int, *states: Any, component: str = "model") -> None:
    """One state for each rank."""
    job.world_size = len(states)
    for rank, state in enumerate(states):
        job.stage(step, {component: state}, rank=rank)
    job.commit(step, component)


def changes(job: Job, before: dict[str, Any], after: dict[str, Any]) -> dict[str, TensorChange]:
    commit(job, 1, before)
    commit(job, 2, after)
    return {change.name: change for change in diff(job.root, 1, 2)}


def test_a_change_is_measured_as_torch_measures_it(job: Job) -> None:
    torch.manual_seed(0)
    before = torch.randn(3, 1000)
    after = before.clone()
    after[0] += torch.randn(1000)
    change = changes(job, {"w": before, "b": before}, {"w": after, "b": before.clone()})["w"]
    assert (change.state, change.elements, change.changed) == ("changed", 3000, 1000)
    assert change.max_abs == pytest.approx(float((after - before).abs().max()))
    assert change.relative_l2 == pytest.approx(float((after - before).norm() / before.norm()))


def test_the_greatest_change_comes_first_and_what_has_no_partner_before_it(job: Job) -> None:
    one = torch.ones(10)
    before = {"small": one, "large": one, "same": one, "cut": one, "gone": one, "typed": one}
    after = {
        "small": one + 0.01,
        "large": one + 1,
        "same": one.clone(),
        "cut": torch.ones(5),
        "come": one,
        "typed": one.bfloat16(),
    }
    found = [(change.name, change.state) for change in changes(job, before, after).values()]
    assert found == [
        ("gone", "missing"),
        ("come", "new"),
        ("cut", "reshaped"),
        ("typed", "retyped"),
        ("large", "changed"),
        ("small", "changed"),
        ("same", "same"),
    ]


def test_shards_of_a_tensor_count_as_one(job: Job) -> None:
    commit(job, 1, {"w": torch.zeros(4)}, {"w": torch.ones(4)})
    commit(job, 2, {"w": torch.zeros(4)}, {"w": torch.ones(4) * 3})
    (change,) = diff(job.root, 1, 2)
    assert (change.elements, change.changed, change.max_abs) == (8, 4, 2.0)
    assert change.relative_l2 == pytest.approx(2.0)


def test_nested_states_are_compared_by_their_paths(job: Job) -> None:
    def adam(value: float) -> dict[str, Any]:
        return {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"lr": value}]}

    commit(job, 1, adam(1), component="optim")
    commit(job, 2, adam(2), component="optim")
    (change,) = diff(job.root, 1, 2, component="optim")
    assert (change.name, change.relative_l2) == ("state.0.step", 1.0)


def test_tensors_longer_than_a_piece_and_empty_tensors_are_compared_whole(job: Job) -> None:
    before, after = torch.zeros(PIECE + 3), torch.zeros(PIECE + 3)
    after[0] = after[-1] = 1
    found = changes(job, {"w": before, "e": torch.ones(0)}, {"w": after, "e": torch.ones(0)})
    assert found["w"].changed == 2
    assert found["w"].relative_l2 == math.inf
    assert found["e"].state == "same"


def test_what_is_no_number_is_counted_and_equal_to_itself(job: Job) -> None:
    before, after = torch.ones(4), torch.ones(4)
    before[0] = after[0] = math.nan
    after[1] = math.inf
    change = changes(job, {"w": before}, {"w": after})["w"]
    assert (change.changed, change.nonfinite) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_dtype_can_be_compared(job: Job, dtype: torch.dtype) -> None:
    before = torch.zeros(4).to(dtype)
    after = torch.tensor([0.0, 1.0, 0.0, 1.0]).to(dtype)
    assert changes(job, {"w": before}, {"w": after})["w"].changed == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_large_integers_that_are_one_float_differ(job: Job, dtype: torch.dtype) -> None:
    first = 2**53 if dtype == torch.int64 else 2**63
    before, after = (torch.tensor([first + n, 7], dtype=dtype) for n in range(2))
    change = changes(job, {"w": before}, {"w": after})["w"]
    assert (change.state, change.changed) == ("changed", 1)


def test_a_sharded_tensor_is_compared_without_a_process_group(job: Job) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensors = [DTensor.from_local(torch.full((4,), value), mesh) for value in (1.0, 2.0)]
        for step, tensor in enumerate(tensors, start=1):
            commit(job, step, {"w": tensor})
    finally:
        dist.destroy_process_group()
    (change,) = diff(job.root, 1, 2)
    assert (change.changed, change.relative_l2) == (4, 1.0)


def test_steps_of_which_one_is_replaced_meanwhile_are_not_compared(job: Job) -> None:
    for run in (1, 2):
        open_run(job.root, str(run), 0)
        for step in (1, 2):
            job.stage(step, {"model": {"w": torch.full((9,), float(run * step))}}, run=run)
            if run == 1:
                job.commit(step)
    shard = job.root / "global_step_2/actor/model_world_size_1_rank_0.pt"
    with (
        when_opened(shard, lambda: job.commit(2, run=2)),
        pytest.raises(CommitError, match=r"step 2 .* run 2 has replaced it"),
    ):
        diff(job.root, 1, 2)


def test_what_cannot_be_compared_is_a_sentence(job: Job) -> None:
    commit(job, 1, {"w": torch.ones(2)})
    commit(job, 2, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    with pytest.raises(ConfigError, match="by 1 ranks at step 1 and by 2 at step 2"):
        diff(job.root, 1, 2)
    with pytest.raises(CommitError, match=r"step 3 .* is not committed"):
        diff(job.root, 1, 3)
    with pytest.raises(CommitError, match=r"no optim of role actor .*\(it has actor/model\)"):
        diff(job.root, 1, 2, component="optim")
    assert list_leases(job.root) == []


def rename_file(job: Job, step: int, name: str) -> None:
    """Let the only shard of a step be a file of another name below the role's folder."""
    manifest = read_manifest(job.root, step)
    assert manifest
    (record,) = (file for file in manifest.files if file.component == "model")
    (job.root / f"global_step_{step}" / record.path).rename(
        job.root / f"global_step_{step}" / "actor" / name
    )
    others = tuple(file for file in manifest.files if file is not record)
    files = (*others, replace(record, path=f"actor/{name}"))
    write_manifest(job.root, replace(manifest, files=files))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", r"no model of role actor .*\(it has actor/model\); trinity-sync"),
        ("__0_0.distcp", r"no model of role actor .*; it was saved by Megatron, load it by Meg"),
    ],
)
def test_weights_of_another_format_are_named_with_what_reads_them(
    job: Job, name: str, message: str
) -> None:
    commit(job, 1, {"w": torch.ones(2)})
    commit(job, 2, {"w": torch.ones(2)})
    rename_file(job, 2, name)
    with pytest.raises(CommitError, match=message):
        diff(job.root, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_zeros_of_another_sign_differ(job: Job, dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    turned = torch.view_as_real(zeros.clone()) if dtype.is_complex else zeros.clone()
    turned[0] = -0.0
    turned = torch.view_as_complex(turned) if dtype.is_complex else turned
    before = {"zeros": zeros, "both": torch.cat([zeros, ones])}
    after = {"zeros": turned, "both": torch.cat([turned, 2 * ones])}
    found = changes(job, before, after)
    assert [(found[n].state, found[n].changed, found[n].max_abs) for n in ("zeros", "both")] == [
        ("changed", 1, 0.0),
        ("changed", 4, 1.0),
    ]


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda dense: dense.to_sparse(),
    "compressed": lambda dense: dense.to_sparse_csr(),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8),
    "nested": lambda dense: torch.nested.nested_tensor([dense, dense[:1]]),
    "jagged": lambda dense: torch.nested.nested_tensor([dense, dense[:1]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_not_strided_is_compared_as_a_whole(job: Job, form: str) -> None:
    make, one = FORMS[form], torch.eye(3)
    before = {"w": one, "same": make(one), "changed": make(one), "new": one}
    after = {"w": 2 * one, "same": make(one), "changed": make(2 * one), "new": make(one)}
    found = changes(job, before, after)
    states = ["changed", "same", "changed", "changed"]
    assert [found[n].state for n in ("w", "same", "changed", "new")] == states
    assert "sparse" in found["changed"].shape or "a NestedTensor" in found["changed"].shape
