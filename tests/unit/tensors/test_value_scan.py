"""What the bytes of a file tell of its values: none of them hides, and nothing in them is run."""

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trinity_sync.storage.manifest import FileHealth
from trinity_sync.tensors.archive import list_tensors
from trinity_sync.tensors.health import SLICE, ValueScan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save(state: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(state, file)
    return memoryview(file.getvalue())


def measure(state: Any) -> FileHealth:
    image = save(state)
    scan, digest = ValueScan(image), xxhash.xxh3_128()
    for part in scan.walk(image):
        digest.update(part)
    assert digest.digest() == xxhash.xxh3_128(image).digest()  # all bytes, in order
    return FileHealth(*scan.sum_up())


def make_tensor(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ten slices and a few values, none of which is the largest."""
    generator = torch.Generator().manual_seed(1)
    numel = 10 * SLICE // torch.tensor([], dtype=dtype).element_size() + 7
    return torch.rand(numel, generator=generator).sub(0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(
    dtype: torch.dtype, value: float
) -> None:
    tensor = make_tensor(dtype)
    for place in (0, SLICE // tensor.element_size() - 1, len(tensor) // 2, -1):
        changed = tensor.clone()
        changed[place] = value
        found = measure({"good": tensor[:9].clone(), "layers": [{"w": changed}]})
        assert (found.tensors, found.nonfinite, found.names) == (2, 1, ("layers.0.w",))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_largest_are_those_of_the_finite_values(dtype: torch.dtype) -> None:
    tensor = make_tensor(dtype)
    tensor[-3] = -9
    tensor[2] = float("inf")
    finite = tensor[tensor.isfinite()].double()
    found = measure({"w": tensor})
    assert found.largest == 9
    assert found.norm == pytest.approx(finite.norm().item(), rel=0.01)  # estimated
    assert measure({"w": tensor[:999].clone()}).norm == pytest.approx(
        finite[:998].norm().item(), rel=1e-6
    )


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_a_norm_whose_square_is_no_float_is_right(scale: float) -> None:
    found = measure({"w": torch.full((9, 9000), -scale)})
    assert found.norm == pytest.approx(scale * 81000**0.5, rel=1e-5)


def test_tensors_count_once_and_what_lies_between_them_does_not() -> None:
    both = torch.full((600, 1000), float("nan"))
    part = both[:, ::2]
    part.fill_(2)
    weight = torch.nn.Parameter(torch.ones(3, 4))
    found = measure({"part": part, "a": weight, "tied": weight, "t": torch.ones(5, 7).t()})
    assert (found.tensors, found.nonfinite, found.largest) == (3, 0, 2)
    assert found.norm == pytest.approx((300_000 * 4 + 12 + 35) ** 0.5)
    assert measure({"both": both}).nonfinite == 300_000


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_two_floats_each(dtype: torch.dtype) -> None:
    tensor = torch.full((40, 50), -2 + 1j, dtype=dtype)
    tensor[3, 4], tensor[7, 8] = complex(1, float("nan")), complex(float("inf"), 1)
    states = {"w": tensor, "t": tensor[1:7].t(), "gaps": tensor[:, :5], "conj": tensor[4:].conj()}
    for name, count in {"w": 2, "t": 1, "gaps": 1, "conj": 1}.items():
        found = measure({"scalar": torch.tensor(0j), name: states[name]})
        assert (found.tensors, found.nonfinite, found.names) == (2, count, (name,))
        assert found.largest == 2
    assert measure({"w": tensor[10:].clone()}).norm == pytest.approx((1500 * 5) ** 0.5)


class Own(torch.Tensor):
    """A tensor of a user's class."""


@pytest.mark.parametrize("of", [Own, torch.nn.Parameter])
def test_tensors_of_other_classes_and_with_attributes_are_looked_at(of: Any) -> None:
    tensor = torch.tensor([1, float("nan")]).as_subclass(of)
    tensor.scale = torch.tensor([float("inf")])
    found = measure({"w": [tensor]})
    assert (found.tensors, found.nonfinite, found.names) == (2, 2, ("w.0", "w.0.scale"))


def test_what_lies_in_the_gaps_of_an_expanded_tensor_does_not_count() -> None:
    whole = torch.full((10, 4), float("nan"))
    whole[:, :2] = 3
    whole[5, 1] = float("inf")
    found = measure({"w": whole[:, :2].unsqueeze(0).expand(6, 10, 2)})
    assert (found.tensors, found.nonfinite, found.largest) == (1, 1, 3)
    assert found.norm == pytest.approx((19 * 9) ** 0.5)


def test_other_values_are_passed_over() -> None:
    states = {
        "steps": torch.arange(5),
        "empty": torch.ones(0),
        "sparse": torch.eye(3).to_sparse(),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "flag": torch.tensor(True),
        "plain": {1: (None, "text", 0.5, {3}), "dtype": torch.float32},
        "module": torch.nn.Linear(2, 2),
        "scalar": torch.tensor(1.0),
    }
    names = {each.name for each in list_tensors(save(states)) if each.storage == "FloatStorage"}
    assert {"scalar", "module._parameters.weight", "module._parameters.bias"} <= names
    assert measure(states).nonfinite == 0


def test_shards_of_dtensors_have_their_names() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        full = torch.ones(4, 4)
        full[3, 3] = float("nan")
        shard = distribute_tensor(full, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert measure({"state": {0: {"exp_avg": shard}}}).names == ("state.0.exp_avg",)
    finally:
        dist.destroy_process_group()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_file_names_is_run(tmp_path: Path) -> None:
    found = measure({"evil": Evil(tmp_path / "made"), "w": torch.tensor([float("nan")])})
    assert found.names == ("w",)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("cut", [10, 1000])
def test_bytes_that_are_no_file_of_torch_are_refused(cut: int) -> None:
    with pytest.raises(Exception, match=r".+"):
        ValueScan(save({"w": torch.ones(9999)})[:-cut])
