"""An image is the file that torch.save would have written, as far as any reader can tell."""

import copy
import gc
import io
import os
import subprocess
import sys
import threading
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.forked import Program
from trinity_sync.errors import ImageError
from trinity_sync.snapshot.image import ALIGNMENT, Layout, UndetachedStateDict, fill, lay_out

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def filled(layout: Layout, storages: list[Any]) -> bytes:
    image = torch.full((layout.nbytes + 5,), 0xAB, dtype=torch.uint8)
    fill(image, layout, storages)
    return image[: layout.nbytes].numpy().tobytes()


def image_of(state: Any) -> bytes:
    return filled(*lay_out(state))


def loaded(image: bytes, **how: Any) -> Any:
    return torch.load(io.BytesIO(image), **{"weights_only": True, **how})


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def records_in(content: bytes) -> dict[str, bytes]:
    """But for those that tell one file, or one alignment, from another."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            if name not in ("archive/.data/serialization_id", "archive/.storage_alignment"):
                with archive.open(name) as record:
                    record._expected_crc = None  # type: ignore[attr-defined]  # of no data
                    found[name] = record.read()
    return found


def nested(**how: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(40000, 3)], **how)


BASE = torch.arange(700.0).reshape(100, 7)
SPECIAL: dict[str, Callable[[], Any]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(500, 700), 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.randn(500, 700), torch.rand(500) + 0.1, torch.zeros(500).long(), 0, torch.quint8
    ),
    "quantized to 4 bits": lambda: torch.quantize_per_channel(
        torch.randn(5, 8), torch.rand(5), torch.zeros(5), 0, torch.quint4x2
    ),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "sparse": lambda: torch.eye(300).to_sparse(),
    "sparse rows": lambda: torch.eye(300).to_sparse_csr(),
    "lazy": lambda: torch.nn.LazyLinear(4).state_dict(),
    "uninitialized": torch.nn.UninitializedBuffer,
    "storage": lambda: torch.randn(70000).untyped_storage(),
    "view": lambda: torch.arange(6.0).reshape(2, 3)[:, 1:].t(),
    "tied": lambda: [BASE, BASE[10:20], BASE.t()],
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "module": lambda: torch.nn.BatchNorm1d(4).state_dict(),
}
"""What torch.save accepts besides plain tensors and values."""


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL.keys())
def test_the_image_of_whatever_torch_saves_holds_what_torch_writes(make: Any) -> None:
    inner = make()
    state = {"plain": torch.randn(9), "special": inner, "again": [inner]}
    image = image_of(state)
    assert records_in(image) == records_in(saved(state))
    torch.load(io.BytesIO(image), weights_only=False)


class SavesItself:
    """As dataloaders and metrics do: what it holds is bytes of torch.save."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> bytes:
        return saved(self.tensor)

    def __setstate__(self, content: bytes) -> None:
        self.tensor = torch.load(io.BytesIO(content))


def test_what_an_object_saves_of_itself_has_its_data() -> None:
    tensor = torch.randn(70000)
    image = image_of({"loader": SavesItself(tensor)})
    assert torch.equal(loaded(image, weights_only=False)["loader"].tensor, tensor)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert torch.equal(
            one.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        )
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other or (one != one and other != other)


tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 1000),
)
leaves = (
    tensors | st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=150, deadline=None)
def test_the_image_of_any_nested_state_holds_what_torch_writes(state: Any) -> None:
    image = image_of(state)
    assert records_in(image) == records_in(saved(state))
    assert_equal(loaded(image), state)


@given(states, states)
@settings(max_examples=150, deadline=None)
def test_a_known_layout_is_used_only_where_it_gives_the_same_file(first: Any, second: Any) -> None:
    known, storages = lay_out(first)
    image = torch.zeros(known.nbytes, dtype=torch.uint8)
    fill(image, known, storages)
    layout, storages = lay_out(second, known)
    if layout is known:
        fill(image, layout, storages, there=known)
        assert_equal(loaded(image.numpy().tobytes()), second)


def rebuilt(state: Any, leaf: Callable[[Any], Any], shared: list[Any]) -> Any:
    """An equal state, but for what ``leaf`` makes of its leaves; sharing of containers stays."""
    made: dict[int, Any] = {}

    def build(value: Any) -> Any:
        if value == "shared":
            return build(shared)
        if isinstance(value, str):
            return sys.intern(leaf(value))
        if not isinstance(value, (dict, list, tuple)):
            return leaf(value)
        if id(value) not in made:
            if isinstance(value, dict):
                made[id(value)] = type(value)((build(k), build(v)) for k, v in value.items())
            else:
                made[id(value)] = type(value)(map(build, value))
            if isinstance(value, OrderedDict):
                made[id(value)].attribute = list(map(build, value.values()))
        return made[id(value)]

    return build(state)


def without_identity(image: bytes) -> bytes:
    """Without the archive's serialization_id and its checksum; that of the pickle is checked."""
    with zipfile.ZipFile(io.BytesIO(image)) as archive:
        assert archive.read("archive/data.pkl")
        name = "archive/.data/serialization_id"
        identity, checksum = archive.read(name), archive.getinfo(name).CRC.to_bytes(4, "little")
    return image.replace(identity, b"").replace(checksum, b"")


shared_states = st.recursive(
    leaves | st.floats() | st.just("shared"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.floats() | st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(
    shared_states, st.lists(st.floats(), min_size=1), st.sampled_from(["floats", "all"]), st.data()
)
@settings(max_examples=100, deadline=None)
def test_a_layout_with_other_values_is_the_one_laid_out_afresh(
    state: Any, shared: list[float], change: str, data: st.DataObject
) -> None:
    def other(value: Any) -> Any:
        changes = isinstance(value, float if change == "floats" else (float, int, str))
        return data.draw(alike(value)) if changes else value

    first = rebuilt([torch.zeros(3), shared, state], lambda value: value, shared)
    changed = rebuilt([torch.zeros(3), shared, state], other, shared)
    known, storages = lay_out(first)
    again, changed_storages = lay_out(changed, known)
    image = torch.full((max(known.nbytes, again.nbytes),), 0xAB, dtype=torch.uint8)
    fill(image, known, storages)
    fill(image, again, changed_storages, there=known)
    image = image[: again.nbytes].numpy().tobytes()
    assert without_identity(image) == without_identity(image_of(changed))


def alike(value: float | int | str) -> st.SearchStrategy[Any]:
    if isinstance(value, float):
        return st.floats()
    if isinstance(value, bool):
        return st.booleans()
    return st.just(value) | (st.text(max_size=3) if value == str(value) else st.integers())


MESH = make_mesh("cpu", 0, 1)


def one_rank_dtensor(shard: torch.Tensor) -> DTensor:
    return make_dtensor(shard, MESH, shard.shape)


def same_objects(items: list[Any]) -> list[int]:
    return [next(n for n, other in enumerate(items) if other is each) for each in items]


@pytest.mark.parametrize("of", [torch.nn.Parameter, torch.Tensor.detach, one_rank_dtensor])
def test_entries_that_become_one_object_or_two_are_laid_out_again(of: Any) -> None:
    shared = torch.ones(4)
    one, other = of(shared), of(shared)
    two = [shared, one, other], [shared, one, one]
    three = [one, other, other], [one, other, one]
    for first, second in ([one, other], [one, one]), ([one, one], [one, other]), two, three:
        known, _ = lay_out(first)
        assert lay_out(list(first), known)[0] is known
        again = loaded(filled(*lay_out(second, known)))
        assert same_objects(again) == same_objects(second)


NUMBERS, COMPLEX = torch.arange(12.0), torch.randn(6, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NUMBERS[:4], NUMBERS[4:8]),
        (NUMBERS[:4], NUMBERS[:8:2]),
        (COMPLEX, COMPLEX.conj()),
        (COMPLEX.imag, COMPLEX.conj().imag),
        (NUMBERS.clone(), NUMBERS.clone().requires_grad_()),
    ],
    ids=["offset", "strides", "conjugate", "negative", "gradient"],
)
def test_a_tensor_of_another_form_is_laid_out_again(
    first: torch.Tensor, second: torch.Tensor
) -> None:
    known, _ = lay_out({"w": first})
    assert lay_out({"w": first}, known)[0] is known
    assert lay_out({"w": second}, known)[0] is not known


@pytest.mark.parametrize("rate", [0.2, -0.0, float("nan"), float("inf"), 5e-324])
def test_a_float_that_changes_is_put_into_the_known_layout(rate: float) -> None:
    betas = (0.9, 0.999)

    def state(rate: float) -> Any:
        groups = [{"lr": 0.1, "betas": betas}, {"lr": rate, "betas": betas, "eps": rate}]
        values = OrderedDict({1.5: rate})
        values.attributes = [2.5, rate]  # type: ignore[attr-defined]
        return {
            "state": [torch.ones(3), torch.ones(2)],
            "param_groups": groups,
            "others": [values, values.__dict__, 0.1],
        }

    known, _ = lay_out(state(0.1))
    layout, storages = lay_out(state(rate), known)
    assert [*map(id, layout.extents[1:-1])] == [*map(id, known.extents[1:-1])]
    image = filled(layout, storages)
    assert without_identity(image) == without_identity(image_of(state(rate)))
    again = loaded(image)["param_groups"]
    assert [group["lr"].hex() for group in again] == [(0.1).hex(), rate.hex()]
    assert lay_out(state(rate), layout)[0] is layout


def test_a_state_is_released_at_once() -> None:
    numbers = np.ones(1000)
    alive = weakref.ref(numbers)
    gc.disable()
    try:
        known = lay_out({"w": torch.from_numpy(numbers)})[0]
        lay_out({"w": torch.from_numpy(numbers)}, known)
        del numbers
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("of", [dict, OrderedDict, UndetachedStateDict])
def test_a_state_that_a_thread_changes_while_it_is_laid_out_is_known_as_it_was_written(
    of: Any,
) -> None:
    state = of(tensors=[torch.ones(2) for _ in range(200)], queued=0, of_worker=np.zeros(1))
    has_ended = threading.Event()

    def consume() -> None:
        while not has_ended.is_set():
            state["queued"] ^= 1
            state["of_worker"] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        layouts = [lay_out(state)[0] for _ in range(10)]
    finally:
        has_ended.set()
        consumer.join()
        sys.setswitchinterval(before)
    for known in layouts:
        written = loaded(filled(known, lay_out(state)[1]), weights_only=False)
        state |= {"queued": written["queued"], "of_worker": written["of_worker"]}
        assert lay_out(state, known)[0] is known
        state["queued"] ^= 1
        other = loaded(filled(*lay_out(state, known)), weights_only=False)
        assert other["queued"] == state["queued"]


def test_metadata_of_a_modules_state_that_changes_is_laid_out_again() -> None:
    state = torch.nn.BatchNorm1d(4).state_dict()
    known, _ = lay_out(state)
    assert lay_out(state, known)[0] is known
    state._metadata[""]["version"] += 1  # type: ignore[attr-defined]
    assert lay_out(state, known)[0] is not known


def test_a_key_that_is_a_value_as_well_is_known_again() -> None:
    key = (1, 2)
    state = {"shapes": {key: 1}, "last": key}
    known, _ = lay_out(state)
    assert lay_out(state, known)[0] is known


def test_arrays_and_random_states_are_taken_by_value() -> None:
    numbers = np.arange(5)
    state = {"numpy": np.random.get_state(), "array": numbers, "cpu": torch.get_rng_state()}
    image = image_of(state)
    numbers[:] = -1
    again = loaded(image, weights_only=False)
    assert again["array"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(again["cpu"], state["cpu"])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["random"][1].__setitem__(3, 1),
        lambda state: state.update(other=state["random"][1].copy()),
        lambda state: state.update(other=state["other"].view(np.int32)),
        lambda state: state.update(other=state["other"].reshape(-1, 2)),
        lambda state: state.update(other=state["other"][::-1]),
        lambda state: state.update(other=state["other"].astype(object)),
        lambda state: state.update(other=np.zeros(1 << 20)),
    ],
)
def test_a_random_state_is_laid_out_again_only_when_it_has_changed(
    change: Callable[[Any], None],
) -> None:
    state: Any = {"random": np.random.RandomState(1).get_state()}
    state["other"] = state["random"][1]
    known, _ = lay_out(state)
    assert lay_out(copy.deepcopy(state), known)[0] is known
    change(state)
    assert lay_out(state, known)[0] is not known
    again = loaded(image_of(state), weights_only=False)
    assert_equal(again["other"].tolist(), state["other"].tolist())
    assert again["random"][1].tolist() == state["random"][1].tolist()


def test_parameters_as_they_are_give_the_file_of_detached_tensors() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    module.tied = module[0].weight
    live = partial(module.state_dict, keep_vars=True)
    known, _ = lay_out(UndetachedStateDict(live()))
    module[0].weight.note = "an attribute is not part of a state"  # type: ignore[attr-defined]
    with torch.no_grad():
        module[0].weight.add_(1)
    layout, storages = lay_out(UndetachedStateDict(live()), known)
    assert layout is known
    image = filled(layout, storages)
    assert records_in(image) == records_in(saved(dict(module.state_dict())))
    module[0].weight.data = torch.ones(4, 2)
    assert lay_out(UndetachedStateDict(live()), known)[0] is not known


def test_tensor_data_starts_at_page_boundaries_and_the_callers_setting_is_left_alone() -> None:
    before = config.save.storage_alignment
    layout, _ = lay_out([torch.zeros(n) for n in (1, 5000, 3)])
    assert all(offset % ALIGNMENT == 0 for offset, _ in layout.holes)
    assert config.save.storage_alignment == before


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("not now")


def resized(nbytes: int) -> torch.Tensor:
    """A tensor whose storage is shorter than it is."""
    tensor = torch.empty(1000)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ((i for i in range(3)), "TypeError"),
        (lambda: 0, "PicklingError|AttributeError"),
        (Refuses(), "RuntimeError: not now"),
        (torch.randn(3, 4).to_mkldnn(), "NotImplementedError"),
        (torch.empty(3, device="meta"), "ValueError: a tensor on the device meta has no data"),
        (torch.nn.Linear(3, 2, device="meta").weight, "ValueError: .* has no data"),
        (resized(0), "ValueError: a tensor is larger than its storage"),
        (torch.nn.Parameter(resized(40)), "ValueError: a tensor is larger than its storage"),
    ],
    ids=["generator", "lambda", "object", "opaque", "meta", "offloaded", "freed", "shortened"],
)
def test_a_state_that_cannot_be_pickled_is_an_error_that_names_the_key(
    inner: Any, why: str
) -> None:
    state = {"w": torch.zeros(3), "groups": [{"lr": 0.1}, {"a": 1, "odd": inner}]}
    with pytest.raises(ImageError, match=rf"^groups\[1\]\.odd cannot be pickled, ({why})"):
        lay_out(state)
    lay_out({"w": torch.zeros(3)})


def test_a_storage_that_was_freed_since_the_last_save_is_found() -> None:
    state = {"w": torch.ones(1000)}
    known, _ = lay_out(state)
    state["w"].untyped_storage().resize_(0)
    with pytest.raises(ImageError, match=r"^w cannot .* larger than its storage"):
        lay_out(state, known)


def test_a_state_that_is_too_deep_is_an_error_that_says_so() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ImageError, match="RecursionError"):
        lay_out({"x": deep})


def test_what_interrupts_the_program_is_no_failure_of_a_state() -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lay_out({"x": Interrupts()})


def test_every_process_writes_the_same_image_of_the_same_dtensors(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tests.unit.snapshot.test_image import image_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
state = {name: distribute_tensor(torch.ones(9, 2), mesh, [Shard(0)]) for name in ("a", "b")}
state["b"] += hash(state["a"]._spec) % 1  # which it keeps from now on
Path(sys.argv[1]).write_bytes(image_of(state))
dist.destroy_process_group()
"""
    env = {**os.environ, "PYTHONHASHSEED": "1"}  # of the hashes of strings: the fork has another
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "new")], check=True, env=env)
    Program(script, tmp_path / "forked").end()
    images = [(tmp_path / name).read_bytes() for name in ("new", "forked")]
    assert images[0] == images[1]
    state = loaded(images[0], weights_only=False)
    assert torch.equal(state["b"].to_local(), torch.ones(9, 2))
    assert hash(state["a"]._spec) == hash(state["b"]._spec)  # computed here
