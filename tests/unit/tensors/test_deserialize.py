"""The bytes of a file, in memory, become the state that torch.load gives, without a copy."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.support.dtensors import make_dtensor, make_mesh
from tests.unit.snapshot.test_image import (
    SPECIAL,
    assert_equal,
    image_of,
    records_in,
    resized,
    saved,
    states,
)
from trinity_sync.errors import ImageError
from trinity_sync.fs.direct_io import open_to_read, read_fd
from trinity_sync.tensors.deserialize import (
    deserialize,
    deserialize_outline,
    deserialize_unread,
)


def from_memory(content: bytes) -> Any:
    return deserialize(memoryview(bytearray(content)))


@given(states)
@settings(max_examples=150, deadline=None)
def test_any_nested_state_comes_back_as_torch_load_gives_it(state: Any) -> None:
    assert_equal(from_memory(image_of(state)), state)
    assert_equal(from_memory(saved(state)), state)


def test_values_of_numpy_are_read_where_something_has_imported_the_stub_of_numpy_2() -> None:
    pytest.importorskip("numpy._core")  # NumPy 1.26.4 has it, without modules; 1.26.0 has none
    state = {"lr": np.float64(0.5), "seeds": np.arange(3)}
    found = deserialize_outline(memoryview(bytearray(image_of(state))))
    assert (found["lr"], [*found["seeds"]]) == (0.5, [0, 1, 2])


def test_large_tensors_are_the_memory_that_was_given_and_small_ones_outlive_it() -> None:
    """As the ranks of a mesh: torch keeps the meshes that it has computed on."""
    mesh, large = make_mesh("cpu", 0, 16384), torch.ones(17_000)
    sharded = make_dtensor(large, mesh, torch.Size([17_000 * 16384]))
    small = torch.ones(3, dtype=torch.bfloat16)
    content = bytearray(image_of({"a": large, "b": small, "m": sharded}))
    start = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    state = deserialize(memoryview(content))
    for tensor in (state["a"], state["m"].to_local()):
        assert start <= tensor.data_ptr() < start + len(content)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    content[:] = bytes(len(content))
    assert torch.equal(state["b"], small)
    assert torch.equal(state["m"].device_mesh.mesh, mesh.mesh)


def anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.parametrize("save", [image_of, saved])
def test_a_tensor_that_is_kept_keeps_no_memory_of_the_others(
    save: Callable[[Any], bytes], tmp_path: Path
) -> None:
    """An optimizer keeps its tensors, and some of them may be small."""
    small = {f"step {n}": torch.tensor(float(n)) for n in range(100)}
    large = {f"moment {n}": torch.full((1 << 18,), float(n)) for n in range(32)}
    (tmp_path / "state.pt").write_bytes(save({**small, **large}))
    nbytes = (tmp_path / "state.pt").stat().st_size
    with open_to_read(tmp_path / "state.pt") as fd:
        image, _ = read_fd(fd, nbytes)
    state = deserialize(image)
    del image
    loaded = anonymous_memory()
    kept = {name: state[name] for name in ("step 7", "moment 3", "moment 4")}
    freed = sum(tensor.nbytes for tensor in large.values()) - 2 * kept["moment 3"].nbytes
    del state
    assert loaded - anonymous_memory() > freed * 0.98
    for name, tensor in kept.items():
        assert torch.equal(tensor, {**small, **large}[name])


@pytest.mark.parametrize("kind", sorted(SPECIAL.keys() - {"storage"}))
@pytest.mark.parametrize("save", [image_of, saved])
def test_whatever_torch_saves_comes_back(kind: str, save: Callable[[Any], bytes]) -> None:
    inner = SPECIAL[kind]()
    state = {"plain": torch.randn(9), "special": inner, "again": [inner]}
    assert records_in(saved(from_memory(save(state)))) == records_in(saved(state))


def test_a_file_that_is_cut_short_is_named_as_what_it_is() -> None:
    content = image_of({"w": torch.zeros(5000)})
    for length in (0, 10, len(content) // 2, len(content) - 1):
        with pytest.raises(ImageError, match=r"no file of torch\.save"):
            from_memory(content[:length])


@pytest.mark.parametrize("nbytes", [0, 40])
def test_a_tensor_that_is_larger_than_its_storage_is_refused(nbytes: int) -> None:
    content = memoryview(bytearray(saved({"w": torch.ones(9), "x": resized(nbytes)})))
    with pytest.raises((ImageError, RuntimeError), match=r"larger than its storage|not resizable"):
        deserialize(content)
    with pytest.raises(ImageError, match="larger than its storage"):
        deserialize_unread(content)


def test_a_compressed_archive_is_refused() -> None:
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"w": torch.zeros(5000)}))) as archive,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other,
    ):
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    with pytest.raises(ImageError, match="compressed"):
        from_memory(packed.getvalue())
