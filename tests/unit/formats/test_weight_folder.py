"""Versions of the weights as folders, complete or as deltas, and whole whenever a process dies."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import models
from tests.support.command import invoke
from tests.support.disk import flip_a_byte, no_file_above
from tests.support.dying import in_a_process
from tests.support.powercut import Recording, after, cuts
from tests.support.states import equal_bits
from trinity_sync import FolderReader, WeightFolder
from trinity_sync.errors import ConfigError, DeltaError, ExportError, WeightSyncError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.storage.runs import open_run
from trinity_sync.weights.folder import writer
from trinity_sync.weights.folder.delta import apply_delta
from trinity_sync.weights.folder.published import (
    PublishedVersion,
    iter_version_folders,
    read_latest,
)

State = dict[str, torch.Tensor]
Read = tuple[PublishedVersion, State]


tiny = partial(models.tiny, 40, dtype="bfloat16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a model that an engine serves."""
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "vocab.txt").write_text("a")
    (folder / "training_args.bin").write_bytes(b"large")
    return folder


@dataclass
class StateView:
    """A version without a job."""

    step: int
    tensors: State
    run: int = 1
    identity: str = "one"
    root: str = "ckpts"

    @property
    def version(self) -> Any:
        names = {"step": self.step, "run": self.run, "identity": self.identity}
        return SimpleNamespace(root=self.root, run_key="", **names)

    def list_named(self) -> list[tuple[tuple[str, ...], torch.Size, torch.dtype]]:
        return [((name,), tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()]

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.clone()


def weights(step: int) -> State:
    """Weights of a step, of which few elements differ from those of another one."""
    found = {name: tensor.clone() for name, tensor in tiny().state_dict().items()}
    embedding = found["model.embed_tokens.weight"].view(-1)
    embedding[step % 7 :: 7] += step
    found["model.norm.weight"] += step
    return found


@cache
def first() -> State:
    return dict(tiny().state_dict())


NORM = "model.norm.weight"


def small(step: int) -> State:
    """Weights of a step, of which one small tensor differs from those of another one."""
    return {**first(), NORM: torch.full((16,), float(step), dtype=torch.bfloat16)}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(equal_bits(one[name], other[name]) for name in one)


def publish(folder: WeightFolder, *steps: int) -> PublishedVersion:
    """Publish the small weights of steps; return the last version."""
    return [folder.publish(StateView(step, small(step))) for step in steps][-1]


def versions_in(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


def test_an_engine_of_another_user_may_read_a_version(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=1)
    for step in (1, 2):
        published = folder.publish(StateView(step, weights(step)))
        assert {path.stat().st_mode & 0o444 for path in published.folder.iterdir()} == {0o444}


def test_a_large_model_is_sharded_as_transformers_does(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "out", model, max_shard_bytes=4000)
    published = folder.publish(StateView(1, weights(1)))
    index = json.loads((published.folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert files == sorted(path.name for path in published.folder.glob("*.safetensors"))
    found = AutoModelForCausalLM.from_pretrained(published.folder)
    assert same(found.state_dict(), weights(1))
    assert same(FolderReader(tmp_path / "out").load(), weights(1))


def test_each_version_has_its_own_folder_and_the_last_two_stay(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "out", model)
    with pytest.raises(ConfigError, match="pass a WeightReader, a FolderReader or a view"):
        folder.publish(tiny())
    for step in (10, 20, 30):
        published = folder.publish(StateView(step, weights(step)))
        assert published == folder.latest() == read_latest(tmp_path / "out")
    assert versions_in(tmp_path / "out") == ["weight_v000002", "weight_v000003"]
    again = WeightFolder(tmp_path / "out", model).publish(StateView(30, weights(30)))
    assert again == published
    resumed = folder.publish(StateView(20, weights(99), run=2))
    assert resumed.folder.name == "weight_v000004"
    assert same(load_file(resumed.folder / "model.safetensors"), weights(99))


@pytest.mark.parametrize("deltas", [0, 9])
def test_weights_that_engines_would_not_load_are_not_published(
    tmp_path: Path, model: Path, deltas: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=deltas)
    published = publish(folder, 2, 3)
    with pytest.raises(ConfigError, match=r"step 3 of run 1 .* its weights differ from .* step 3"):
        folder.publish(StateView(3, small(4)))
    assert folder.publish(StateView(2, small(2))) == published  # that no run has superseded
    assert re.search(r"step 2 of run 1 .* it comes before step 3", caplog.text)
    assert folder.publish(StateView(3, small(3))) == folder.latest() == published


@pytest.mark.parametrize("deltas", [0, 9])
def test_what_a_run_has_superseded_gives_way_in_the_folder_and_in_its_copies(
    root: Path, tmp_path: Path, model: Path, deltas: int
) -> None:
    folder, follower = WeightFolder(tmp_path / "out", model), FolderReader(tmp_path / "out")
    local = WeightFolder(tmp_path / "local", model, deltas=deltas)  # of a host without the root
    open_run(root, "first", 0)
    for step in (20, 23):
        published = folder.publish(StateView(step, small(step), root=str(root)))
        local.publish(follower)
    resumed = StateView(20, small(20), root=str(root))
    assert folder.publish(resumed) == published  # the trainer has not resumed yet
    open_run(root, "second", 20, 1)
    folder = WeightFolder(tmp_path / "out", model, deltas=deltas)
    for view in (resumed, StateView(21, small(99), run=2, root=str(root))):
        published = folder.publish(view)
        away = root.rename(tmp_path / "away")
        copied = local.publish(follower)
        away.rename(root)
        assert (published.step, copied.step) == (view.step, view.step)
        assert same(FolderReader(tmp_path / "local").load(), view.tensors)


def test_a_folder_is_that_of_one_job_while_its_publisher_lives_and_is_not_killed(
    tmp_path: Path, model: Path
) -> None:
    first = WeightFolder(tmp_path / "out", model)
    first.publish(StateView(5, small(5)))
    theirs = StateView(1, small(1), identity="other", root="theirs")
    with pytest.raises(WeightSyncError, match=r"in theirs .* of the job in ckpts, whose publisher"):
        WeightFolder(tmp_path / "out", model).publish(theirs)
    assert WeightFolder(tmp_path / "out", model).publish(StateView(6, small(6))).version == 2
    assert first.publish(StateView(7, small(7))).version == 3
    first = WeightFolder(tmp_path / "elsewhere", model)
    assert WeightFolder(tmp_path / "out", model).publish(theirs).version == 4
    in_a_process(
        lambda: WeightFolder(tmp_path / "killed", model).publish(StateView(5, small(5))), tmp_path
    )
    assert WeightFolder(tmp_path / "killed", model).publish(theirs).version == 2


def test_a_training_that_begins_again_in_the_root_is_published_from_its_first_step(
    tmp_path: Path, model: Path
) -> None:
    folder, follower = WeightFolder(tmp_path / "out", model), FolderReader(tmp_path / "out")
    folder.publish(StateView(30, weights(30)))
    follower.load()
    published = folder.publish(StateView(30, weights(1), identity="other"))
    assert published.folder.name == "weight_v000002"
    assert asyncio.run(follower.wait_newer(timeout_s=250)) == published
    assert same(follower.load(), weights(1))
    assert folder.publish(StateView(1, weights(2), identity="third")).step == 1


@pytest.mark.parametrize("deltas", [0, 2])
def test_a_reader_on_another_host_gets_every_version_bit_equal(
    tmp_path: Path, model: Path, deltas: int
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=deltas)
    follower = FolderReader(tmp_path / "out")
    local = WeightFolder(tmp_path / "local", model)
    bases = []
    for step in range(1, 8):
        published = folder.publish(StateView(step, weights(step)))
        bases.append(published.base)
        assert asyncio.run(follower.wait_newer(timeout_s=250)) == published
        copied = local.publish(follower)
        assert (copied.step, copied.checksum) == (step, published.checksum)
        assert same(load_file(copied.folder / "model.safetensors"), weights(step))
        assert same(FolderReader(tmp_path / "out").load(), weights(step))
        assert asyncio.run(follower.wait_newer(timeout_s=0)) is None
    assert bases == ([None] * 7 if not deltas else [None, 1, 2, None, 4, 5, None])
    assert versions_in(tmp_path / "out") == (
        [f"weight_v00000{n}" for n in ((6, 7) if not deltas else (4, 5, 6, 7))]
    )


@pytest.mark.parametrize("deltas", [0, 1])
def test_a_disk_that_is_full_is_an_os_error_and_the_version_before_stays(
    deltas: int, tmp_path: Path, model: Path
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=deltas)
    folder.publish(StateView(1, small(1)))
    problem = r"File too large: .*safetensors|File too large: .*part"
    with pytest.raises(OSError, match=problem), no_file_above(64):
        folder.publish(StateView(2, small(2)))
    assert same(FolderReader(tmp_path / "out").load(), small(1))
    assert {path.name for path in (tmp_path / "out").glob("*weight*")} == {"weight_v000001"}
    assert folder.publish(StateView(3, small(3))).base is None
    assert same(FolderReader(tmp_path / "out").load(), small(3))


def test_tensors_of_another_dtype_than_before_are_published_complete(
    tmp_path: Path, model: Path
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=9)
    reader = FolderReader(tmp_path / "out")
    for step, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32], 1):
        state = {name: tensor.to(dtype) for name, tensor in small(step).items()}
        published = folder.publish(StateView(step, state))
        assert published.base is None
        assert same(reader.load(), state)
        said = json.loads((published.folder / "config.json").read_text())["dtype"]
        assert f"torch.{said}" == str(dtype)


@pytest.fixture
def chain(tmp_path: Path, model: Path) -> Path:
    """A complete version and three deltas."""
    folder = WeightFolder(tmp_path / "out", model, deltas=9)
    publish(folder, *range(1, 5))
    return tmp_path / "out"


def test_changed_tensors_are_read_again_and_do_not_change_with_their_files(
    tmp_path: Path, model: Path
) -> None:
    folder, reader = WeightFolder(tmp_path / "out", model, deltas=2), FolderReader(tmp_path / "out")
    folder.publish(StateView(1, small(1)))
    reader.load()[NORM].zero_()
    folder.publish(StateView(2, small(2)))
    assert same(reader.load(), small(2))
    published = WeightFolder(tmp_path / "next", model).publish(StateView(1, small(1)))
    found = FolderReader(tmp_path / "next").load()
    flip_a_byte(published.folder / "model.safetensors", -1)
    assert same(found, small(1))


def test_an_altered_or_missing_delta_is_refused_by_name(chain: Path) -> None:
    delta = next((chain / "weight_v000003").glob("*.safetensors"))
    intact = delta.read_bytes()
    refused = 0
    for at in range(len(intact)):
        flip_a_byte(delta, at)
        try:
            found = FolderReader(chain).load()
        except WeightSyncError as error:
            refused += "weight_v000003" in str(error) or "weight_v000004" in str(error)
        else:
            assert same(found, small(4))  # e.g. a flag that zstd ignores
        delta.write_bytes(intact)
    assert refused > len(intact) * 0.9
    delta.write_bytes(intact[:-1])
    with pytest.raises(DeltaError, match=r"weight_v000003.*torn"):
        FolderReader(chain).load()
    delta.write_bytes(intact)
    shutil.rmtree(chain / "weight_v000003")
    with pytest.raises(DeltaError, match="version 3 is missing"):
        FolderReader(chain).load()


def test_deltas_in_a_wrong_order_and_an_altered_complete_version_are_refused(chain: Path) -> None:
    base = load_file(chain / "weight_v000001/model.safetensors")
    second = apply_delta(base, chain / "weight_v000002")
    assert same(second, small(2))
    assert same(base, small(1))
    for tensors, delta in ((base, 3), (second, 2), (small(7), 2)):
        with pytest.raises(DeltaError, match=rf"weight_v00000{delta}.*checksum differs"):
            apply_delta(tensors, chain / f"weight_v00000{delta}")
    flip_a_byte(chain / "weight_v000001/model.safetensors", -1)
    with pytest.raises(WeightSyncError, match=r"weight_v000002.*checksum differs"):
        FolderReader(chain).load()
    shutil.copytree(chain / "weight_v000001", chain.parent / "one/weight_v000001")
    shutil.copy(chain / "weight_v000001/version.json", chain.parent / "one/latest.json")
    with pytest.raises(WeightSyncError, match="weight_v000001 is corrupted"):
        FolderReader(chain.parent / "one").load()


def test_a_version_that_is_removed_while_it_is_read_is_replaced_by_a_newer_one(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WeightFolder(tmp_path / "out", model, keep=1)
    folder.publish(StateView(1, small(1)))
    steps = count(2)

    reader = FolderReader(tmp_path / "out")
    reading = reader._read

    def read(latest: PublishedVersion) -> None:
        if (step := next(steps)) < 5:
            folder.publish(StateView(step, small(step)))
        reading(latest)

    monkeypatch.setattr(reader, "_read", read)
    assert same(reader.load(), small(4))


def test_a_missing_base_is_followed_by_a_complete_version(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=9)
    publish(folder, 1, 2, 3)
    shutil.rmtree(tmp_path / "out/weight_v000001")
    assert [folder.publish(StateView(step, small(step))).base for step in (4, 5)] == [None, 4]
    assert versions_in(tmp_path / "out") == ["weight_v000004", "weight_v000005"]
    assert same(FolderReader(tmp_path / "out").load(), small(5))


def test_old_versions_are_removed_before_those_that_they_build_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=2, keep=1)
    publish(folder, 1, 2, 3)
    remove, left = writer.remove_version, count(1)

    def remove_one(path: Path) -> None:
        if next(left) > 1:
            raise InterruptedError
        remove(path)

    monkeypatch.setattr(writer, "remove_version", remove_one)
    with pytest.raises(InterruptedError):
        folder.publish(StateView(4, small(4)))
    assert versions_in(tmp_path / "out") == [f"weight_v00000{n}" for n in (1, 2, 4)]
    WeightFolder(tmp_path / "out", model, deltas=2, keep=9).publish(StateView(5, small(5)))
    assert versions_in(tmp_path / "out") == [f"weight_v00000{n}" for n in (1, 2, 4, 5)]


def test_a_history_has_every_version_bit_equal_also_those_that_were_published_again(
    tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "out"
    published = []
    for run, steps in ((1, (1, 2, 3, 4, 5)), (2, (4, 5, 6, 7))):  # a new process for each run
        folder = WeightFolder(out, model, deltas=2, keep="all")
        for step in steps:
            published.append(folder.publish(StateView(step, weights(10 * run + step), run)))
    reader = FolderReader(out)
    assert reader.list_versions() == published
    assert [each.base is None for each in published] == [i in (0, 3, 5, 8) for i in range(9)]
    for version in Random(7).sample(published * 2, 18):
        assert same(reader.load(version), weights(10 * version.run + version.step))
    reader.load(published[2])
    assert asyncio.run(reader.wait_newer(0)) == published[-1]
    shutil.rmtree(published[0].folder)
    assert FolderReader(out).list_versions() == published[1:]
    for version in published[:3]:
        with pytest.raises(DeltaError, match="version 1 is missing in"):
            FolderReader(out).load(version)
    assert same(reader.load(published[3]), weights(14))


@pytest.fixture
def history(tmp_path: Path, model: Path) -> Path:
    """Three chains of three versions, of the steps 1 to 9."""
    folder = WeightFolder(tmp_path / "out", model, deltas=2, keep="all")
    publish(folder, *range(1, 10))
    return tmp_path / "out"


def prune(out: Path, *options: str) -> dict[str, list[int]]:
    """What the command says that it did, oldest first."""
    done = invoke("prune", out, *options, "-o", "json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, list[int]] = {}
    for row in reversed(json.loads(done.stdout)["prune"]["steps"]):
        found.setdefault(row["status"], []).append(row["step"])
    return found


def steps_left(out: Path) -> list[int]:
    """The steps of a history, each of which is as it was published."""
    reader = FolderReader(out)
    found = reader.list_versions()
    assert all(same(reader.load(each), small(each.step)) for each in found)
    return [each.step for each in found]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("all", range(1, 10)), ("last=1", range(7, 10)), ("last=4", range(4, 10)),
        ("every=2", range(1, 10)), ("every=6", range(4, 10)), ("every=100", range(7, 10)),
        ("newer=1h", range(1, 10)),
    ],
)  # fmt: skip
def test_old_versions_are_removed_by_whole_chains(
    history: Path, model: Path, keep: str, left: range
) -> None:
    gone = [*range(1, left[0])]
    assert prune(history, "--keep", keep, "--dry-run").get("would be removed", []) == gone
    assert steps_left(history) == [*range(1, 10)]
    publisher = WeightFolder(history, model, deltas=2, keep="all")
    assert prune(history, "--keep", keep, "--yes").get("removed", []) == gone
    assert steps_left(history) == [*left]
    publisher.publish(StateView(10, small(10)))
    assert steps_left(history) == [*left, 10]


def test_chains_stay_that_a_reader_has_open(history: Path) -> None:
    reader = FolderReader(history)
    versions = reader.list_versions()
    reader.load(versions[0])
    assert prune(history, "--keep", "last=1", "--yes") == {
        "removed": [4, 5, 6], "kept": [1, 2, 3, 7, 8, 9]
    }  # fmt: skip
    assert same(reader.load(versions[2]), small(3))
    with pytest.raises(DeltaError, match="version 4 is missing"):
        reader.load(versions[3])
    reader.load(versions[-1])
    assert prune(history, "--keep", "last=1", "--yes") == {"removed": [1, 2, 3], "kept": [7, 8, 9]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep", "best=1:reward:max"], "reward"), (["--keep", "first=1"], "first=1"),
        (["--keep", "last=1", "--keep-model", "all"], "no root of a job"),
        (["--keep", "last=1"], "not confirmed: remove 6 steps"),
    ],
)  # fmt: skip
def test_no_chain_is_removed_by_what_does_not_choose_any(
    history: Path, options: list[str], said: str
) -> None:
    done = invoke("prune", history, *options)
    assert done.exit_code == 2
    assert said in done.stderr
    assert steps_left(history) == [*range(1, 10)]


def test_whenever_a_removal_of_chains_is_killed_what_is_left_is_rebuilt_bit_equal(
    history: Path, tmp_path: Path
) -> None:
    found = []
    for moment in count(1):
        out = shutil.copytree(history, tmp_path / f"copy_{moment}")
        removal = partial(prune, out, "--keep", "last=1", "--yes")
        died = in_a_process(removal, tmp_path, die_before=moment)
        found.append(steps_left(out))
        assert prune(out, "--keep", "last=1", "--yes")["kept"] == [7, 8, 9]
        assert steps_left(out) == [7, 8, 9]
        assert len(versions_in(out)) == 3  # nothing of the killed one is left
        if died != moment:
            break
    assert found[0] == [*range(1, 10)]
    assert len({*map(tuple, found)}) == 7  # one version after the other


def test_only_one_process_and_program_publishes_into_a_folder(tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(tmp_path / "out", model)
    folder.publish(StateView(1, small(1)))
    with try_acquire_file_lock(tmp_path / "out/.publisher.lock") as acquired:
        assert acquired
        with pytest.raises(WeightSyncError, match="another process publishes"):
            folder.publish(StateView(2, small(2)))
    assert folder.publish(StateView(2, small(2))).version == 2
    theirs = tmp_path / "theirs/weight_v000003"
    theirs.mkdir(parents=True)
    with pytest.raises(ConfigError, match="not published by trinity_sync"):
        WeightFolder(tmp_path / "theirs", model).publish(StateView(1, small(1)))
    assert theirs.is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "missing"}, "neither config.json nor adapter_config.json"),
        ({"keep": 0}, "keep=0"),
        ({"deltas": -1}, "deltas=-1"),
        ({"model": "adapter", "deltas": 1}, "published whole"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, model: Path, arguments: dict[str, Any], said: str
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    arguments = {**arguments, "model": tmp_path / arguments.get("model", "model")}
    with pytest.raises(ConfigError, match=said):
        WeightFolder(tmp_path / "out", **arguments)


@pytest.mark.parametrize("init", ["pissa_niter_4", "olora", "gaussian"])
def test_an_adapter_that_has_changed_its_base_is_not_published_alone(
    tmp_path: Path, init: Any
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=init)
    config.save_pretrained(tmp_path / "adapter")
    is_changed = init != "gaussian"
    refused = pytest.raises(ConfigError, match=rf"init_lora_weights='{init}', which changed the ba")
    with refused if is_changed else nullcontext():
        folder = WeightFolder(tmp_path / "out", tmp_path / "adapter")
    if not is_changed:
        whole = peft.get_peft_model(tiny(), config).state_dict()
        with pytest.raises(ExportError, match=r"PEFT does not load.*get_peft_model_state_dict"):
            folder.publish(StateView(1, whole))
        assert folder.latest() is None


def test_weights_that_do_not_change_from_step_to_step_are_named(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = WeightFolder(tmp_path / "out", model, deltas=1)
    for step, state in ((1, 1), (2, 2), (3, 2)):
        folder.publish(StateView(step, small(state)))
    assert [each.message for each in caplog.records] == [
        "step 3 of ckpts is published, but has the weights of step 2"
    ]


def read(out: Path) -> Read | None:
    """What a reader finds that comes now: a whole version, or nothing."""
    if read_latest(out) is None:
        return None
    reader = FolderReader(out)
    tensors = reader.load()
    complete = list(reader.version.folder.glob("config.json"))
    assert complete or reader.version.base is not None
    return replace(reader.version, folder=Path()), tensors


def step_of(found: Read | None) -> int:
    if found is None:
        return 0
    version, tensors = found
    assert same(tensors, small(version.step))
    return version.step


COMPLETE = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "vocab.txt", "version.json"),
}
DELTA = {"model-00000-of-00001.safetensors", "model.safetensors.index.json", "version.json"}


@pytest.mark.parametrize(("deltas", "keep"), [(0, 1), (9, 1), (2, "all")])
def test_whenever_the_publisher_is_killed_the_marker_names_a_whole_version(
    tmp_path: Path, model: Path, deltas: int, keep: Any
) -> None:
    WeightFolder(tmp_path / "begin", model).publish(StateView(1, small(1)))

    def go_on(out: Path) -> None:
        folder = WeightFolder(out, model, deltas=deltas, keep=keep)
        publish(folder, 2, 3, 4)

    found = []
    for moment in count(1):
        out = tmp_path / f"out_{moment}"
        shutil.copytree(tmp_path / "begin", out)
        died = in_a_process(lambda out=out: go_on(out), tmp_path, die_before=moment)
        found.append(step_of(read(out)))
        for _, path in iter_version_folders(out):  # also for readers that compare no checksum
            assert {each.name for each in path.iterdir()} in (COMPLETE, DELTA)
        WeightFolder(out, model, keep=keep).publish(StateView(5, small(5)))
        assert step_of(read(out)) == 5
        reader = FolderReader(out)
        left = [
            each.step
            for each in reader.list_versions()
            if same(reader.load(each), small(each.step))
        ]
        assert left == ([*range(1, found[-1] + 1), 5] if keep == "all" else [5])
        assert len(versions_in(out)) == len(left)  # nothing of the killed one is left
        if died != moment:
            break
    assert found == sorted(found)
    assert {*found} == {1, 2, 3, 4}
    assert len(found) > (10 if keep == "all" else 15)  # nothing is removed


def record(tmp_path: Path, model: Path, deltas: int) -> Recording:
    out = tmp_path / "out"
    out.mkdir()
    recording = Recording(out)
    folder = WeightFolder(out, model, deltas=deltas, keep=1)
    with recording.running():
        for step in (1, 2, 3):
            folder.publish(StateView(step, small(step)))
            recording.done(str(step))
    return recording


def problems(tmp_path: Path, recording: Recording) -> Iterator[str]:
    returned = {instant: int(step) for instant, step in recording.acknowledged}
    acknowledged, known = 0, {}
    for instant in range(len(recording.changes) + 1):
        acknowledged = returned.get(instant, acknowledged)
        for disk in (after(recording, instant), *cuts(recording, instant, Random(instant), 4)):
            if (picture := disk.picture()) not in known:
                disk.build(tmp_path / "disk")
                try:
                    known[picture] = step_of(read(tmp_path / "disk"))
                except (WeightSyncError, AssertionError) as error:
                    known[picture] = -1
                    yield f"change {instant}: {error}"
                shutil.rmtree(tmp_path / "disk")
            if known[picture] not in (acknowledged, acknowledged + 1):
                yield f"change {instant}: step {known[picture]} after step {acknowledged}"


@pytest.mark.parametrize("deltas", [0, 9])
def test_whenever_the_power_goes_the_marker_names_a_whole_version(
    tmp_path: Path, model: Path, deltas: int
) -> None:
    recording = record(tmp_path, model, deltas)
    assert len(recording.changes) > 30
    assert not list(problems(tmp_path, recording))


def test_the_metadata_of_a_delta_is_that_of_slime(chain: Path) -> None:
    index = json.loads((chain / "weight_v000002/model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {
            "version": "000002",
            "base_version": "000001",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": {NORM: "model-00000-of-00001.safetensors"},
    }
    with safe_open(chain / "weight_v000002/model-00000-of-00001.safetensors", "np") as file:
        xor = zstandard.ZstdDecompressor().decompress(file.get_tensor(NORM).data)
        checksum = file.metadata()[NORM]
    old, new = (small(step)[NORM].view(torch.uint8).numpy() for step in (1, 2))
    assert xor == (old ^ new).tobytes()
    assert checksum == xxhash.xxh3_128_hexdigest(new.tobytes())
