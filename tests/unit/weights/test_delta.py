"""Changes of bytes: any two, bit for bit, and nothing torn or of another base."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.errors import DeltaError
from trinity_sync.weights.folder.delta import Array, Change, apply_change, encode_change, view_bytes

SIZE = 4 << 20


@st.composite
def two_tensors(draw: st.DrawFn) -> tuple[Array, Array]:
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.one_of(st.integers(0, 5000), st.sampled_from([SIZE, SIZE + 1, SIZE + 2])))
    old, fresh = (random.integers(0, 256, size, np.uint8) for _ in range(2))
    share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]))
    return old, np.where(random.random(size) < share, fresh, old)


@settings(max_examples=150, deadline=None)
@given(two_tensors())
def test_a_change_turns_any_bytes_into_any_others_bit_for_bit(pair: tuple[Array, Array]) -> None:
    old, new = pair
    into = old.copy()
    apply_change(into, encode_change(old, new), "it")
    assert into.tobytes() == new.tobytes()


@settings(max_examples=80, deadline=None)
@given(two_tensors(), st.data())
def test_any_flipped_bit_and_any_cut_is_refused_or_does_no_harm(
    pair: tuple[Array, Array], data: st.DataObject
) -> None:
    old, new = pair
    content, checksum = encode_change(old, new)
    with pytest.raises(DeltaError):
        apply_change(old.copy(), Change(content, ""), "it")
    if not content:
        return
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    into = old.copy()
    try:
        apply_change(into, Change(bytes(flipped), checksum), "it")
    except DeltaError:
        pass
    else:
        assert into.tobytes() == new.tobytes()  # e.g. a flag that zstd ignores
    with pytest.raises(DeltaError):
        apply_change(old.copy(), Change(content[:at], checksum), "it")


def test_one_percent_of_bf16_takes_less_than_two_percent_of_the_bytes() -> None:
    old = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    at = np.random.default_rng(0).choice(len(old), len(old) // 100, replace=False)
    new.view(torch.int16)[torch.from_numpy(at)] += 1
    assert len(encode_change(view_bytes(old), view_bytes(new)).content) < 0.02 * old.nbytes
    assert not encode_change(view_bytes(old), view_bytes(old)).content


@pytest.mark.parametrize("size", [39, 41])
def test_a_change_of_other_bytes_is_refused(size: int) -> None:
    change = encode_change(np.zeros(40, np.uint8), np.ones(40, np.uint8))
    with pytest.raises(DeltaError, match="the delta of w in version 4"):
        apply_change(np.zeros(size, np.uint8), change, "w in version 4")
