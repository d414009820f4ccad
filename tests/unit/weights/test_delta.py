"""Deltas of images: any two, bit for bit, and nothing torn or of another base."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync.errors import DeltaError
from trinity_sync.weights.delta import PIECE, Array, Change, apply_delta, encode_delta


def image(tensor: torch.Tensor) -> Array:
    found: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


@st.composite
def two_images(draw: st.DrawFn) -> tuple[Array, Array]:
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.one_of(st.integers(0, 5000), st.sampled_from([PIECE, PIECE + 1, PIECE + 2])))
    old, fresh = (random.integers(0, 256, size, np.uint8) for _ in range(2))
    share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]))
    return old, np.where(random.random(size) < share, fresh, old)


@settings(max_examples=150, deadline=None)
@given(two_images())
def test_a_delta_turns_any_image_into_any_other_bit_for_bit(pair: tuple[Array, Array]) -> None:
    old, new = pair
    into = old.copy()
    apply_delta(encode_delta(old, new), into, "it")
    assert into.tobytes() == new.tobytes()


@settings(max_examples=80, deadline=None)
@given(two_images(), st.data())
def test_any_flipped_bit_and_any_cut_is_refused_or_does_no_harm(
    pair: tuple[Array, Array], data: st.DataObject
) -> None:
    old, new = pair
    delta = encode_delta(old, new)
    refused = [[*delta, Change(b"", "")], delta[:-1] if delta else [Change(b"", "")]]
    changed = [number for number, (content, _) in enumerate(delta) if content]
    if changed:
        number = data.draw(st.sampled_from(changed))
        content, checksum = delta[number]
        at = data.draw(st.integers(0, len(content) - 1))
        flipped = bytearray(content)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        into = old.copy()
        torn = [*delta[:number], Change(bytes(flipped), checksum), *delta[number + 1 :]]
        try:
            apply_delta(torn, into, "it")
        except DeltaError:
            pass
        else:
            assert into.tobytes() == new.tobytes()  # e.g. a flag that zstd ignores
        torn[number] = Change(content[:at], checksum)
        refused.append(torn)
    for torn in refused:
        with pytest.raises(DeltaError):
            apply_delta(torn, old.copy(), "it")


def test_nan_payloads_and_negative_zeros_are_bits() -> None:
    old, new = (torch.tensor([0x7FC00001, 0]), torch.tensor([0x7FC00002, -(1 << 31)]))
    into = image(old.int())
    apply_delta(encode_delta(into.copy(), image(new.int())), into, "it")
    found = torch.from_numpy(into).view(torch.float32)
    assert found.isnan().tolist() == [True, False]
    assert found.view(torch.int32).tolist() == new.tolist()


@pytest.mark.parametrize("apart", [1, 255, 256, 510, 511, 65_535, 65_536, 131_071, PIECE])
def test_changes_at_any_distance_are_encoded(apart: int) -> None:
    old = np.zeros(PIECE + 7, np.uint16).view(np.uint8)
    new = old.copy()
    new.view(np.uint16)[::apart] = 7
    new[-1] = 9
    into = old.copy()
    apply_delta(encode_delta(old, new), into, "it")
    assert into.tobytes() == new.tobytes()


def test_threads_may_share_the_pieces() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 5 * PIECE + 3, np.uint8)
    new = np.where(random.random(len(old)) < 0.01, old + 1, old)
    into = old.copy()
    with ThreadPoolExecutor(3) as pool:
        delta = encode_delta(old, new, map_pieces=pool.map)
        apply_delta(delta, into, "it", pool.map)
    assert delta == encode_delta(old, new)
    assert into.tobytes() == new.tobytes()


def test_one_percent_of_bf16_takes_less_than_two_percent_of_the_bytes() -> None:
    old = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    at = np.random.default_rng(0).choice(len(old), len(old) // 100, replace=False)
    new.view(torch.int16)[torch.from_numpy(at)] += 1
    assert sum(len(each.content) for each in encode_delta(image(old), image(new))) < (
        0.02 * old.nbytes
    )
    assert not any(each.content for each in encode_delta(image(old), image(old)))


@pytest.mark.parametrize("size", [39, 41, PIECE + 40])
def test_a_delta_between_other_images_is_refused(size: int) -> None:
    delta = encode_delta(np.zeros(40, np.uint8), np.ones(40, np.uint8))
    with pytest.raises(DeltaError, match="rank 0 of version 4"):
        apply_delta(delta, np.zeros(size, np.uint8), "rank 0 of version 4")


@pytest.mark.parametrize("at", [900, PIECE + 900])
def test_an_altered_base_is_noticed_wherever_it_was_altered(at: int) -> None:
    old = np.zeros(2 * PIECE, np.uint8)
    new = old.copy()
    new[5] = 1
    delta = encode_delta(old, new)
    old[at] = 1
    with pytest.raises(DeltaError, match="were altered; read the full version"):
        apply_delta(delta, old, "it")
