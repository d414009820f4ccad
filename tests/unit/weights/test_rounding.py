"""Rounding of float32 weights equals torch's conversion to bfloat16, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.weights.delta import (
    PIECE,
    Array,
    apply_delta,
    encode_delta,
    merge_spans,
    read_rounded,
    round_in_place,
)

EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint32) << 16


def bfloat16(bits: Array) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_is_torchs_for_every_sign_exponent_and_kind_of_rest(low: int) -> None:
    bits = EVERY_BFLOAT16 | np.uint32(low)
    kept = bits.copy()
    round_in_place(kept.view(np.uint8), ((0, kept.nbytes),))
    assert torch.equal(bfloat16(kept), bfloat16(bits))
    again = kept.copy()
    round_in_place(again.view(np.uint8), ((0, kept.nbytes),))
    assert np.array_equal(again, kept)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8))
def test_only_the_spans_are_rounded_wherever_an_image_is_cut(found: list[tuple[int, int]]) -> None:
    spans = merge_spans([(4 * start, 4 * (start + length)) for start, length in found])
    image = np.random.default_rng(0).integers(0, 256, 320, np.uint8)
    whole = image.copy()
    round_in_place(whole, spans)
    cuts = [read_rounded(image, start, start + 16, spans) for start in range(0, len(image), 16)]
    assert np.array_equal(np.concatenate(cuts), whole)
    inside = np.zeros(len(image), bool)
    for start, stop in spans:
        inside[start:stop] = True
    assert np.array_equal(whole[~inside], image[~inside])


def test_a_delta_of_masters_has_the_rounded_elements() -> None:
    random = np.random.default_rng(1)
    old = random.standard_normal(PIECE // 2, np.float32)  # two pieces
    new = old * np.float32(1 + 1e-5)
    spans = ((0, old.nbytes),)
    into = old.view(np.uint8).copy()
    round_in_place(into, spans)
    delta = encode_delta(old.view(np.uint8), new.view(np.uint8), spans)
    apply_delta(delta, into, "it")
    assert torch.equal(bfloat16(into.view(np.uint32)), bfloat16(new.view(np.uint32)))
    exact = encode_delta(old.view(np.uint8), new.view(np.uint8))
    sizes = [sum(len(change.content) for change in each) for each in (delta, exact)]
    assert sizes[0] < 0.02 * old.nbytes < sizes[1]
