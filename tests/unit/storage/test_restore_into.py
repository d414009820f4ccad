"""A committed step comes back into tensors that live, in place, or nothing is changed."""

import io
import zipfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.disk import flip_a_byte
from tests.support.job import Job
from tests.support.models import configure
from tests.unit.conftest import Open
from tests.unit.snapshot.test_image import assert_equal, image_of, saved, states
from tests.unit.tensors.test_deserialize import anonymous_memory
from trinity_sync.errors import CommitError, ConfigError, ImageError
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.ticket import read_cached_file
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.restore import fill_states
from trinity_sync.tensors.archive import list_storages, locate_storages
from trinity_sync.tensors.in_place import Filling, plan_copies, plan_filling

SHARD = "actor/model_world_size_1_rank_0.pt"
PLACES = pytest.mark.parametrize("from_spool", [True, False], ids=["spool", "disk"])


def into(job: Job, step: int, live: dict[str, Any], *, from_spool: bool = False) -> dict[str, Any]:
    manifest = require_committed(job.root, step)
    spool = job.spool if from_spool else None
    return fill_states(job.root, manifest, "actor", live, spool=spool)


def fill(content: bytes, live: Any) -> Any:
    """Fill from bytes in pieces of odd lengths."""
    plan = plan_filling(memoryview(bytearray(content)), live)
    for at in range(0, len(content), 1013):
        plan.put(at, memoryview(bytearray(content[at : at + 1013])))
    plan.finish()
    return plan.state


def other(state: Any) -> Any:
    """A state of the same structure, with other values in its tensors and elsewhere."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state) if state.count_nonzero() else torch.ones_like(state)
    if isinstance(state, dict):
        return {key: other(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(other(value) for value in state)
    return "other"


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state
    return (
        [each for value in inner for each in tensors(value)]
        if isinstance(state, dict | list | tuple)
        else []
    )


@PLACES
def test_a_model_and_its_optimizer_are_filled_in_place(job: Job, from_spool: bool) -> None:
    """Of Transformers, with tied weights and other values of its own."""

    def train(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        size = {"layers": 2, "heads": 4}
        config = configure(Qwen2Config, 512, 64, **size, tie_word_embeddings=True)
        model = Qwen2ForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / steps)
        for _ in range(steps):
            tokens = torch.randint(0, 512, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = train(3)
    live = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    job.stage(1, live)
    job.commit(1, "model", "optim")
    model, optimizer = train(1)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    changes = [parameter._version for parameter in model.parameters()]
    into_these = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    loaded = into(job, 1, into_these, from_spool=from_spool)
    assert_equal(model.state_dict(), live["model"])
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert_equal(tensors(optimizer.state_dict()), tensors(live["optim"]))
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.1 / 3
    assert loaded["model"]["lm_head.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert all(
        parameter._version > change
        for parameter, change in zip(model.parameters(), changes, strict=True)
    )


@given(states)
@settings(max_examples=100, deadline=None)
def test_any_nested_state_is_filled(state: Any) -> None:
    live = other(state)
    found = fill(image_of(state), live)
    assert_equal(found, state)
    assert_equal(tensors(live), tensors(state))
    assert [each.data_ptr() for each in tensors(found)] == [
        each.data_ptr() for each in tensors(live)
    ]


@given(states)
@settings(max_examples=50, deadline=None)
def test_storages_are_found_without_a_look_between_them(state: Any) -> None:
    for content in (image_of(state), saved(state)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            there = list_storages(memoryview(content), archive)
            found = locate_storages(archive)
            empty = {
                entry.filename.rpartition("/")[2]
                for entry in archive.infolist()
                if not entry.file_size
            }
        assert found == {key: start for key, start in there.items() if key not in empty}


def test_a_file_that_does_not_name_its_alignment_is_not_guessed_at() -> None:
    content = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(9)})))
    with zipfile.ZipFile(content, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".storage_alignment"):
                new.writestr(entry.filename, old.read(entry))
    with pytest.raises(ImageError, match="aligned"):
        fill(content.getvalue(), {"w": torch.zeros(9)})


class Holder:
    """An object of a user's class, whose tensor is not filled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def with_attribute(state: OrderedDict[str, Any], value: Any) -> OrderedDict[str, Any]:
    state._metadata = value  # type: ignore[attr-defined]
    return state


Two = namedtuple("Two", "one other")
BASE = torch.arange(5000.0).reshape(50, 100)
LAYOUTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "not contiguous": (lambda: BASE.t(), lambda: torch.zeros(50, 100).t()),
    "contiguous here alone": (lambda: BASE.t(), lambda: torch.zeros(100, 50)),
    "contiguous there alone": (lambda: BASE.clone(), lambda: torch.zeros(100, 50).t()),
    "a part of a larger one": (lambda: BASE.clone(), lambda: torch.zeros(99, 100)[7:57]),
    "parts that overlap": (
        lambda: [BASE, BASE[10:20], BASE[15:30]],
        lambda: [torch.zeros(50, 100), torch.zeros(10, 100), torch.zeros(15, 100)],
    ),
    "parts side by side": (
        lambda: [BASE[:20], BASE[20:]],
        lambda: [torch.zeros(20, 100), torch.zeros(30, 100)],
    ),
    "tied there alone": (lambda: [BASE, BASE], lambda: [torch.zeros(50, 100) for _ in "ab"]),
    "the same bytes in another shape": (
        lambda: [BASE, BASE.view(-1)],
        lambda: [torch.zeros(50, 100), torch.zeros(5000)],
    ),
    "conjugated": (
        lambda: torch.complex(BASE, BASE).conj(),
        lambda: torch.zeros(50, 100, dtype=torch.complex64),
    ),
    "conjugated here": (
        lambda: torch.complex(BASE, BASE),
        lambda: torch.zeros(50, 100, dtype=torch.complex64).conj(),
    ),
    "in an object": (lambda: [BASE, Holder(BASE)], lambda: [torch.zeros(50, 100), None]),
    "in an object, in part": (
        lambda: [BASE, Holder(BASE[3:])],
        lambda: [torch.zeros(50, 100), None],
    ),
    "in an attribute of a dict": (
        lambda: with_attribute(OrderedDict(a=BASE), BASE[1:]),
        lambda: OrderedDict(a=torch.zeros(50, 100)),
    ),
    "in an object alone": (lambda: Holder(BASE), lambda: None),
    "a parameter": (
        lambda: torch.nn.Parameter(BASE.clone()),
        lambda: torch.nn.Parameter(torch.zeros(50, 100)),
    ),
    "in a named tuple": (
        lambda: Two(BASE, OrderedDict(a=BASE + 1)),
        lambda: Two(torch.zeros(50, 100), OrderedDict(a=torch.zeros(50, 100))),
    ),
    "empty": (lambda: [torch.zeros(0, 3), BASE], lambda: [torch.ones(0, 3), BASE * 0]),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["memory", "as on a GPU"])
@PLACES
def test_tensors_of_any_layout_are_filled(
    job: Job, case: str, on_gpu: bool, from_spool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: each piece is copied by torch, since no system call can write there."""
    if on_gpu:
        monkeypatch.setattr(Filling, "is_in_memory", False)
    make, zeros = LAYOUTS[case]
    job.commit_states(1, {"model": {"w": make()}})
    live, wanted = zeros(), make()
    found = into(job, 1, {"model": {"w": live}}, from_spool=from_spool)["model"]["w"]
    for each, want in zip(tensors([live]), tensors([wanted]), strict=False):
        assert torch.equal(each, want)
    assert type(found) is type(wanted)
    for each, want in zip(unfilled(found), unfilled(wanted), strict=True):
        assert torch.equal(each, want)


def test_a_part_that_the_saved_state_has_twice_is_filled_twice(job: Job) -> None:
    """At its start, a reference is its actor."""
    own = {"w": torch.arange(5000.0), "more": [torch.ones(3)]}
    job.commit_states(1, {"model": {"actor": own, "ref": own, "list": own["more"]}})
    parts = ("actor", "ref")
    live: dict[str, Any] = {
        name: {"w": torch.zeros(5000), "more": [torch.zeros(3)]} for name in parts
    }
    live["list"] = [torch.zeros(3)]
    found = into(job, 1, {"model": live})["model"]
    assert_equal([live["actor"], live["ref"], live["list"]], [own, own, own["more"]])
    assert found["ref"]["w"] is live["ref"]["w"]
    assert found["actor"]["w"] is live["actor"]["w"]


WEIGHT = torch.zeros(50, 100)
TIED_HERE: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
    "the same memory": ([BASE, BASE + 1], [WEIGHT, WEIGHT]),
    "turned": ([BASE, BASE.t().clone()], [WEIGHT, WEIGHT.t()]),
    "in part": ([BASE, BASE[:9] + 1], [WEIGHT, WEIGHT[7:16]]),
    "another part": ([BASE, BASE[:9]], [WEIGHT, WEIGHT[7:16]]),
    "with gaps": ([BASE[:, :2].clone(), BASE[:, 1:3].clone()], [WEIGHT[:, :2], WEIGHT[:, :2]]),
    "conjugated": (
        [(tied := torch.complex(BASE, BASE)), tied.conj()],
        [(twice := torch.complex(WEIGHT, WEIGHT)), twice],
    ),
}


@PLACES
@pytest.mark.parametrize("case", TIED_HERE)
def test_tensors_that_share_memory_here_and_have_other_values_there_are_refused(
    job: Job, case: str, from_spool: bool
) -> None:
    saved, live = TIED_HERE[case]
    job.commit_states(1, {"model": {"emb": saved[0], "head": saved[1]}})
    with pytest.raises(ConfigError, match="head shares memory with emb, and has other values"):
        into(job, 1, {"model": {"emb": live[0], "head": live[1]}}, from_spool=from_spool)
    with pytest.raises(ConfigError, match=r"1 shares memory with 0, and has other values"):
        plan_copies(saved, live)
    assert not live[0].any()


@pytest.mark.parametrize("case", ["equal", "tied", "parts", "side by side"])
@PLACES
def test_tensors_that_share_memory_here_are_filled_where_their_values_are_the_same(
    job: Job, case: str, from_spool: bool
) -> None:
    saved, live = {
        "equal": ([BASE, BASE.clone()], lambda whole: [whole, whole]),
        "tied": ([BASE, BASE], lambda whole: [whole.t().contiguous().t()] * 2),
        "parts": ([BASE, BASE[:9], BASE.t()], lambda whole: [whole, whole[:9], whole.t()]),
        "side by side": (
            [BASE[:, :7].clone(), BASE[:, 7:].clone()],
            lambda whole: [whole[:, :7], whole[:, 7:]],
        ),
    }[case]
    job.commit_states(1, {"model": saved})
    targets = live(torch.zeros(50, 100))
    into(job, 1, {"model": targets}, from_spool=from_spool)
    again = live(torch.zeros(50, 100))
    plan_copies(saved, again).finish()
    for each in (targets, again):
        assert all(map(torch.equal, each, saved))


def test_a_dtensor_on_ranks_in_another_order_is_refused() -> None:
    def on(*ranks: int) -> DTensor:
        mesh: Any = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=0)
        return DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False)

    image = memoryview(bytearray(image_of({"w": on(0, 1)})))
    plan_filling(image, {"w": on(0, 1)})
    with pytest.raises(ConfigError, match=r"w was saved on ranks \[0, 1\], and is on \[1, 0\]"):
        plan_filling(image, {"w": on(1, 0)})


def unfilled(state: Any) -> list[torch.Tensor]:
    """The tensors that are not among the items of lists and dictionaries."""
    held = [
        each.tensor
        for each in (state if isinstance(state, list) else [state])
        if isinstance(each, Holder)
    ]
    return [*held, state._metadata] if hasattr(state, "_metadata") else held


class Own(torch.Tensor):
    def __deepcopy__(self, _: Any) -> torch.Tensor:
        return self.clone().as_subclass(Own)


def without_memory() -> torch.Tensor:
    """As FSDP frees what it has gathered."""
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(4)
    return tensor


DIFFERENT: dict[str, tuple[Any, str]] = {
    "a name is missing": ({}, r"b\.c is not among those to fill"),
    "a name is new": ({"c": torch.zeros(2), "d": [torch.zeros(1)]}, r"b\.d\.0 was not saved"),
    "another shape": (
        {"c": torch.zeros(1, 2)},
        r"b\.c was saved as torch.float32 \[2\], and is torch.float32 \[1, 2\]",
    ),
    "another dtype": (
        {"c": torch.zeros(2, dtype=torch.float16)},
        r"b\.c was saved as torch.float32 \[2\], and is torch.float16",
    ),
    "no tensor": ({"c": 5}, r"b\.c is not among"),
    "without data": ({"c": torch.zeros(2, device="meta")}, r"b\.c is on the meta device"),
    "sparse": ({"c": torch.zeros(2).to_sparse()}, r"b\.c is of the layout torch.sparse_coo"),
    "without memory": ({"c": without_memory()}, r"b\.c has no memory"),
    "expanded": ({"c": torch.zeros(1).expand(2)}, r"b\.c is expanded"),
    "of another class": ({"c": torch.zeros(2).as_subclass(Own)}, r"b\.c is a Own"),
}
"""What is to be filled in the place of a tensor ``c`` of two elements, and what is said of it."""


@pytest.mark.parametrize("case", DIFFERENT)
@PLACES
def test_other_tensors_are_refused_and_nothing_is_changed(
    job: Job, case: str, from_spool: bool
) -> None:
    other, message = DIFFERENT[case]
    first, second = torch.zeros(7), torch.zeros(3)
    optim = {"a": torch.ones(3), "b": {"c": torch.ones(2)}}
    job.commit_states(1, {"model": {"w": torch.ones(7)}, "optim": optim})
    live = {"model": {"w": first}, "optim": {"a": second, "b": other}}
    with pytest.raises(ConfigError, match=message):
        into(job, 1, live, from_spool=from_spool)
    assert not first.any()
    assert not second.any()


def test_an_unknown_component_is_refused(job: Job) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(7)}})
    with pytest.raises(ConfigError, match="has no component optim to fill: it has model"):
        into(job, 1, {"optim": {}})


@pytest.mark.parametrize("at", [5000, 30, -30])
def test_a_corrupted_slot_is_replaced_by_the_file(job: Job, at: int) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(50_000)}})
    (slot,) = (each for each in job.spool.folder.glob("*.slot") if read_cached_file(each))
    nbytes = (step_folder(job.root, 1) / SHARD).stat().st_size
    flip_a_byte(slot, at % nbytes)
    live = torch.zeros(50_000)
    into(job, 1, {"model": {"w": live}}, from_spool=True)
    assert torch.equal(live, torch.ones(50_000))


def test_a_corrupted_file_says_what_has_changed(job: Job) -> None:
    names = ("model", "optim", "extra_state")
    job.stage(1, {name: {"w": torch.ones(50_000)} for name in names})
    job.commit(1, *names)
    flip_a_byte(step_folder(job.root, 1) / SHARD.replace("model", "optim", 1), 30_000)
    live = {name: {"w": torch.zeros(50_000)} for name in names}
    with pytest.raises(
        CommitError,
        match=r"optim_world.*corrupted.*Tensors of optim have changed.*filled before: model; "
        "unchanged: extra_state",
    ):
        into(job, 1, live)
    assert live["model"]["w"].all()
    assert not live["extra_state"]["w"].any()


def test_a_file_of_another_user_is_filled_from_as_plain_values(job: Job) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(50_000), "n": 3}})
    (step_folder(job.root, 1) / SHARD).chmod(0o666)
    live = torch.zeros(50_000)
    assert into(job, 1, {"model": {"w": live, "n": 0}})["model"]["n"] == 3
    assert live.all()
    job.commit_states(2, {"model": {"w": torch.ones(9), "object": Holder(torch.ones(3))}})
    (step_folder(job.root, 2) / SHARD).chmod(0o666)
    with pytest.raises(CommitError, match="not unpickled"):
        into(job, 2, {"model": {"w": torch.zeros(9)}})


@PLACES
def test_it_takes_no_memory_of_the_size_of_the_state(job: Job, from_spool: bool) -> None:
    """Nor with other values than tensors, as Transformer Engine has."""
    weights = {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(32)}
    others = {"scale": np.float32(1), "extra": io.BytesIO(b"1"), "names": {"a"}}
    job.commit_states(1, {"model": {**weights, **others}})
    for tensor in weights.values():
        tensor.fill_(-1)
    before = anonymous_memory()
    into(job, 1, {"model": {**weights, **others}}, from_spool=from_spool)
    assert anonymous_memory() - before < 64 << 20
    assert all((tensor == n).all() for n, tensor in enumerate(weights.values()))


def test_a_coordinator_resumes_by_it(coordinator_of: Open, job: Job) -> None:
    model = torch.nn.Linear(100, 100)
    with coordinator_of() as saves:
        saves.save(3, {"model": model.state_dict(), "extra_state": {"step": 3}})
        job.commit(3, "model", "extra_state")
    resumed = torch.nn.Linear(100, 100)
    saves = coordinator_of(run_key="next")
    loaded = saves.load_into(3, {"model": resumed.state_dict()})
    assert torch.equal(resumed.weight, model.weight)
    assert loaded["extra_state"] == {"step": 3}
    assert loaded["model"]["weight"].data_ptr() == resumed.weight.data_ptr()
    with pytest.raises(ConfigError, match="began at step 3"):
        saves.load_into(2, {"model": resumed.state_dict()})
