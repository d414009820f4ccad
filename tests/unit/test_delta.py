"""Deltas of the weights: any two versions, bit for bit, and nothing torn or of another base."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError, DeltaError
from trinity_sync.weights.delta import PIECE, apply, encode

Weights = dict[str, torch.Tensor]

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex128,
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype
        and left[n].shape == right[n].shape
        and bits(left[n]) == bits(right[n])
        for n in left
    )


def copied(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def random_tensor(
    random: np.random.Generator, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    values = random.integers(0, 2 if dtype == torch.bool else 256, len(raw), dtype=np.uint8)
    raw.copy_(torch.from_numpy(values))
    return tensor


def changed(random: np.random.Generator, tensor: torch.Tensor, share: float) -> torch.Tensor:
    fresh = random_tensor(random, tensor.dtype, list(tensor.shape))
    take = torch.from_numpy(np.asarray(random.random(tuple(tensor.shape)) < share))
    return torch.where(take, fresh, tensor) if tensor.numel() else fresh


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Weights, Weights]:
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base, new = {}, {}
    for n in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 70), max_size=3))
        tensor = random_tensor(random, draw(st.sampled_from(DTYPES)), shape)
        fate = draw(st.sampled_from(["kept", "new", "removed", "reshaped", "retyped"]))
        if fate != "new":
            base[f"w{n}"] = tensor
        if fate in ("kept", "new"):
            share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]))
            new[f"w{n}"] = changed(random, tensor, share)
        elif fate == "reshaped":
            new[f"w{n}"] = random_tensor(random, tensor.dtype, [*shape, 2])
        elif fate == "retyped":
            new[f"w{n}"] = random_tensor(random, torch.int16, shape)
    return base, new


@settings(max_examples=150, deadline=None)
@given(two_versions())
def test_a_delta_turns_any_base_into_any_version_bit_for_bit(pair: tuple[Weights, Weights]) -> None:
    base, new = pair
    before, after, into = copied(base), copied(new), copied(base)
    apply(encode(base, new, base_version=3, version=4), into, version=3)
    assert same(into, after)
    assert same(base, before), "encoding changed the base"


@settings(max_examples=80, deadline=None)
@given(two_versions(), st.data())
def test_any_flipped_bit_and_any_cut_is_refused_before_anything_is_written(
    pair: tuple[Weights, Weights], data: st.DataObject
) -> None:
    base, new = pair
    whole = encode(base, new, base_version=3, version=4).data.numpy().tobytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    into = copied(base)
    for torn in (bytes(flipped), whole[:at], whole + b"\0"):
        with pytest.raises(DeltaError):
            apply(torn, into, version=3)
    assert same(into, base)


def test_nan_payloads_and_negative_zeros_are_bits() -> None:
    quiet, other = (torch.tensor([b], dtype=torch.int32).view(torch.float32) for b in (1, 2))
    nans = [(t.view(torch.int32) | 0x7FC00000).view(torch.float32) for t in (quiet, other)]
    base = {"nan": nans[0], "zero": torch.zeros(3)}
    new = {"nan": nans[1], "zero": torch.tensor([0.0, -0.0, 0.0])}
    into = copied(base)
    apply(encode(base, new, base_version=0, version=1), into, version=0)
    assert same(into, new)


@pytest.mark.parametrize("apart", [1, 255, 256, 510, 511, 65_535, 65_536, 131_071, PIECE])
def test_changes_at_any_distance_come_over(apart: int) -> None:
    old = torch.zeros(2 * PIECE + 7, dtype=torch.uint8)
    new = old.clone()
    new[::apart] = 7
    new[-1] = 9
    into = {"w": old.clone()}
    apply(encode({"w": old}, {"w": new}, base_version=0, version=1), into, version=0)
    assert torch.equal(into["w"], new)


def test_one_percent_of_bf16_takes_less_than_two_percent_of_the_bytes() -> None:
    old = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    at = np.random.default_rng(0).choice(len(old), len(old) // 100, replace=False)
    new.view(torch.int16)[torch.from_numpy(at)] += 1
    data = encode({"w": old}, {"w": new}, base_version=0, version=1).data
    assert len(data) < 0.02 * old.nbytes
    assert len(encode({"w": old}, {"w": old}, base_version=0, version=1).data) < 300


def test_the_same_tensors_are_written_into_also_where_they_are_not_contiguous() -> None:
    old, new = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 2
    live = torch.empty(4, 3).t().copy_(old)
    into = {"w": live, "p": torch.nn.Parameter(old.clone())}
    parameter = into["p"]
    delta = encode({"w": old, "p": old}, {"w": new, "p": new}, base_version=0, version=1)
    apply(delta, into, version=0)
    assert torch.equal(live, new)
    assert into["p"] is parameter
    assert torch.equal(parameter, new)


def test_a_delta_of_another_base_is_refused() -> None:
    delta = encode({"w": torch.zeros(4)}, {"w": torch.ones(4)}, base_version=3, version=4)
    with pytest.raises(DeltaError, match="from version 3 to 4, but these weights are version 2"):
        apply(delta, {"w": torch.zeros(4)}, version=2)


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ({}, "'w' is .* missing here"),
        ({"w": torch.zeros(5), "gone": torch.zeros(1)}, r"'w' is \['float32', 4\] in version 3"),
        ({"w": torch.zeros(4)}, "other tensors .*'gone'"),
        (dict.fromkeys(("w", "gone", "extra"), torch.zeros(4)), "other tensors .*'extra'"),
    ],
)
def test_missing_unknown_and_reshaped_tensors_are_named(into: Weights, said: str) -> None:
    base = {"w": torch.zeros(4), "gone": torch.zeros(1)}
    delta = encode(base, {"w": torch.ones(4)}, base_version=3, version=4)
    before = copied(into)
    with pytest.raises(DeltaError, match=said):
        apply(delta, into, version=3)
    assert same(into, before)


def test_a_base_that_was_altered_is_noticed() -> None:
    old, new = torch.zeros(1000), torch.zeros(1000)
    new[5] = 1
    delta = encode({"w": old}, {"w": new}, base_version=3, version=4)
    altered = old.clone()
    altered[900] = 1e-30
    with pytest.raises(DeltaError, match=r"'w' is not that of version 4 .*load version 4 whole"):
        apply(delta, {"w": altered}, version=3)


def test_tensors_that_have_no_bytes_here_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'w' is a Tensor .*meta"):
        encode({}, {"w": torch.empty(4, device="meta")}, base_version=0, version=1)
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(ConfigError, match=r"tensor\.to_dense"):
        encode({"w": sparse}, {"w": sparse}, base_version=0, version=1)
