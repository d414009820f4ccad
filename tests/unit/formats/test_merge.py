"""Steps are merged into one of another root: the mean is exact, or there is no step."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from tests.support.command import invoke
from tests.support.disk import flip_a_byte
from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from tests.support.models import tiny
from tests.support.powercut import Recording, cuts
from tests.unit.formats.test_export import shards
from tests.unit.retention.test_retention import prune
from trinity_sync import Checkpoints, WeightReader
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.formats import merge
from trinity_sync.formats.hf_export import export_step
from trinity_sync.formats.merge import choose_steps, merge_steps
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.remote.upload import replicate
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.restore import require_digests
from trinity_sync.storage.runs import open_run

State = dict[str, torch.Tensor]
MESHES = [(), (1,), (2,), (4,), (2, 2)]


def make_state(seed: int) -> State:
    """Sizes that no number of ranks divides, several dtypes, and values that round."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=made, dtype=torch.float64) * 3).to(dtype)

    return {
        "embed.weight": draw(13, 6),
        "block.weight": draw(7, 3, 5, dtype=torch.bfloat16),
        "norm.weight": draw(3, dtype=torch.float16),
        "exact.weight": draw(5, 2, dtype=torch.float64),
        "router.weight": draw(5, 4),
        "seen": torch.arange(5) + seed,
        "mask": torch.arange(4) % 2 == seed % 2,
        "empty": torch.empty(0, 3),
    }


def commit_model(job: Job, step: int, state: State, mesh: tuple[int, ...] = ()) -> None:
    ranks: Sequence[State] = shards(state, mesh) if mesh else [state]
    job.world_size = len(ranks)
    for rank, each in enumerate(ranks):
        job.stage(step, {"model": each, "optim": {"lr": step}}, rank=rank)
    job.commit(step, "model", "optim")


def compute_mean(states: Sequence[State], weights: Sequence[float], name: str) -> torch.Tensor:
    """The reference: float64, in NumPy, without the code that is tested."""
    dtype = states[0][name].dtype
    total = np.zeros(states[0][name].shape)
    for state, weight in zip(states, weights, strict=True):
        total += weight / sum(weights) * state[name].double().numpy()
    return torch.from_numpy(total).to(dtype)


def load_merged(out: Path, step: int, like: State) -> State:
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    Checkpoints(out).load_into(step, found)
    return found


@pytest.fixture
def states(job: Job) -> dict[int, State]:
    """Three steps of a training, each saved by another number of ranks."""
    made = {step: make_state(step) for step in (10, 20, 30)}
    for (step, state), mesh in zip(made.items(), [(), (2,), (4,)], strict=True):
        commit_model(job, step, state, mesh)
    return made


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_merge_equals_a_mean_in_float64(
    job: Job, tmp_path: Path, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_BLOCK", 7)  # several blocks, also within the rows of a tensor
    states = [make_state(seed) for seed in (1, 2, 3)]
    for step, state in enumerate(states, start=1):
        commit_model(job, step, state, mesh)
    done = merge_steps(job.root, [1, 2, 3], tmp_path / "out", weights=[1, 2, 4])
    assert (done.step, done.kinds) == (3, ("state_dict",))
    found = load_merged(tmp_path / "out", 3, states[0])
    for name in ("embed.weight", "block.weight", "norm.weight", "exact.weight", "router.weight"):
        assert torch.equal(found[name], compute_mean(states, [1, 2, 4], name)), name
    assert torch.equal(found["seen"], states[2]["seen"])
    assert torch.equal(found["mask"], states[2]["mask"])
    require_digests(step_folder(tmp_path / "out", 3), done.files)


def test_steps_of_several_numbers_of_ranks_are_merged_by_shares_or_as_a_moving_average(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    merge_steps(job.root, "last=3", tmp_path / "out")
    found = load_merged(tmp_path / "out", 30, states[10])
    mean = compute_mean([*states.values()], [1, 1, 1], "embed.weight")
    assert torch.equal(found["embed.weight"], mean)
    merge_steps(job.root, [30, 10], tmp_path / "other", exclude=["router.*"])
    found = load_merged(tmp_path / "other", 30, states[10])
    assert torch.equal(found["router.weight"], states[30]["router.weight"])
    assert not torch.equal(found["embed.weight"], states[30]["embed.weight"])
    done = merge_steps(job.root, "10,20,30", tmp_path / "ema", ema=0.75)
    expected = states[10]["exact.weight"]
    for step in (20, 30):
        expected = 0.75 * expected + 0.25 * states[step]["exact.weight"]
    found = load_merged(tmp_path / "ema", 30, states[10])["exact.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    assert [each.weight for each in done.parents] == [0.5625, 0.1875, 0.25]


def test_what_is_tied_in_all_sources_is_tied_and_nothing_else(job: Job, tmp_path: Path) -> None:
    for step in (1, 2):
        weight, bias = torch.full((2, 2), float(step)), torch.full((2,), float(step))
        second = bias if step == 2 else bias + 4
        commit_model(job, step, {"a": weight, "b": weight, "c": bias, "d": second})
    merge_steps(job.root, "1,2", tmp_path / "out")
    found = Checkpoints(tmp_path / "out").load(2)["model"]
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert [each.flatten()[0].item() for each in found.values()] == [1.5, 1.5, 1.5, 3.5]


def test_a_merge_knows_its_parents_and_serves_readers_of_its_own_root_alone(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    merge_steps(job.root, "10,20", out)
    parents = require_committed(out, 20).parents
    assert [(each.root, each.step, each.run) for each in parents] == [
        (str(job.root), 10, 1), (str(job.root), 20, 1),
    ]  # fmt: skip
    assert parents[0].digest == require_committed(job.root, 10).weights_digest
    url = f"file://{tmp_path}/remote"
    replicate(out, url, 20)
    for place in (str(out), url):
        listed = invoke("ls", place).stdout
        assert listed.splitlines()[0].endswith("merge of 10, 20")
    with WeightReader(root=out, name="evaluation") as reader:
        found = dict(reader.iter_weights())
    mean = compute_mean([states[10], states[20]], [1, 1], "embed.weight")
    assert torch.equal(found["embed.weight"], mean)
    assert find_newest(out) is None  # nothing to resume from
    assert Checkpoints(out).steps("state_dict") == [20]
    assert find_newest(job.root).step == 30  # type: ignore[union-attr]
    assert steps_on_disk(job.root) == [10, 20, 30]


def test_merges_are_not_superseded_by_later_merges(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    for step in range(40, 80, 10):
        commit_model(job, step, make_state(step))
        merge_steps(job.root, f"{step - 10},{step}", tmp_path / "out")
    write_metrics(tmp_path / "out", 1, 50, {"reward": 2.0})
    prune(tmp_path / "out")
    assert steps_on_disk(tmp_path / "out") == [40, 50, 60, 70]
    assert Checkpoints(tmp_path / "out").resolve("best=reward:max") == 50


def test_a_merge_is_exported_with_the_config_of_its_newest_source(job: Job, tmp_path: Path) -> None:
    models = [tiny(seed=seed) for seed in (1, 2)]
    for step, model in enumerate(models, start=1):
        metadata = tmp_path / f"metadata{step}"
        model.config.save_pretrained(metadata / "huggingface")
        (metadata / "huggingface/model.safetensors").write_text("weights of one step")
        job.stage(step, {"model": model.state_dict()}, metadata=metadata)
        job.commit(step, "model", "metadata")
    done = merge_steps(job.root, "1,2", tmp_path / "out")
    assert not [file.path for file in done.files if file.path.endswith(".safetensors")]
    export_step(tmp_path / "out", 2, to=tmp_path / "hf")
    found = load_file(tmp_path / "hf/model.safetensors")
    sources = [model.state_dict() for model in models]
    assert all(torch.equal(t, compute_mean(sources, [1, 1], n)) for n, t in found.items())


def test_adapters_are_merged_and_exported(job: Job, tmp_path: Path) -> None:
    sources = []
    for step in (1, 2):
        torch.manual_seed(step)
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(tiny(), config)
        metadata = tmp_path / f"metadata{step}"
        model.peft_config["default"].save_pretrained(metadata / "lora_adapter")
        model.base_model.model.config.save_pretrained(metadata / "huggingface")
        sources.append(get_peft_model_state_dict(model))
        job.stage(step, {"model": sources[-1]}, metadata=metadata)
        job.commit(step, "model", "metadata")
    merge_steps(job.root, "1,2", tmp_path / "out")
    export_step(tmp_path / "out", 2, to=tmp_path / "hf")
    found = load_file(tmp_path / "hf/lora_adapter/adapter_model.safetensors")
    assert found.keys() == sources[0].keys()
    assert all(torch.equal(t, compute_mean(sources, [1, 1], n)) for n, t in found.items())
    assert json.loads((tmp_path / "hf/lora_adapter/adapter_config.json").read_text())["r"] == 2


def test_retention_leaves_the_sources_until_the_merge_ends(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    removed: list[Any] = []
    shard = step_folder(job.root, 30) / "actor/model_world_size_4_rank_3.pt"
    with when_opened(shard, lambda: removed.extend(prune(job.root).removed)):
        merge_steps(job.root, "10,30", tmp_path / "out")
    assert [each.step for each in removed] == [20]
    assert [each.step for each in prune(job.root).removed] == [10]


def test_a_killed_merge_leaves_no_step_and_the_next_one_completes_it(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    whole = {f.path: f.digest for f in merge_steps(job.root, "10,20", tmp_path / "whole").files}
    for die_before in itertools.count(1):
        out = tmp_path / f"out{die_before}"
        died = in_a_process(
            lambda out=out: merge_steps(job.root, "10,20", out),  # type: ignore[misc]
            tmp_path,
            die_before=die_before,
        )
        if died != die_before:
            break
        if steps_on_disk(out):  # it died after the commit
            with pytest.raises(CommitError, match="has a step 20 already"):
                merge_steps(job.root, "10,20", out)
        else:
            merge_steps(job.root, "10,20", out)
        done = require_committed(out, 20)
        assert {f.path: f.digest for f in done.files} == whole
        require_digests(step_folder(out, 20), done.files)
    assert die_before > 5


def test_whenever_the_power_goes_there_is_the_whole_merge_or_none(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with Recording(out).running() as recording:
        done = merge_steps(job.root, "10,20", out)
        recording.done("merged")
    committed = 0
    for instant in range(len(recording.changes) + 1):
        for number, disk in enumerate(cuts(recording, instant, Random(instant), 12)):
            found = tmp_path / f"found{instant}.{number}"
            disk.build(found)
            for step in steps_on_disk(found):
                assert require_committed(found, step).files == done.files
                require_digests(step_folder(found, step), done.files)
                committed += 1
            assert steps_on_disk(found) or instant < recording.acknowledged[0][0]
            shutil.rmtree(found)
    assert committed > 5


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("10,20", [10, 20]),
        ("30, 10", [30, 10]),
        (["latest", 10], [30, 10]),
        ("every=20,30", [20, 30]),
        ("best=2:reward:max", [10, 30]),
        ("best=reward:min,latest", [10, 30]),
        ("last=2", [20, 30]),
    ],
)
def test_steps_are_chosen_by_numbers_names_and_policies(
    job: Job, states: dict[int, State], words: Any, chosen: list[int]
) -> None:
    for step, reward in {10: 1.0, 20: float("nan"), 30: 2.0}.items():
        write_metrics(job.root, 1, step, {"reward": reward})
    assert choose_steps(job.root, words) == chosen


def test_what_cannot_be_merged_or_is_corrupted_is_a_sentence_and_changes_nothing(
    job: Job, states: dict[int, State], tmp_path: Path
) -> None:
    commit_model(job, 40, {**make_state(4), "embed.weight": torch.zeros(13, 7)})
    quantized = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "scale": torch.ones(1)}
    for step in (50, 60):
        commit_model(job, step, quantized)
    open_run(tmp_path / "another", "training", 0)
    whole = [10, 20]
    for steps, out, how, error, sentence in [
        ([10], "out", {}, ConfigError, "chooses 1 step"),
        ([10, 99], "out", {}, CommitError, "step 99 .* not committed"),
        (whole, "ckpts", {}, ConfigError, "root of a training"),
        (whole, "another", {}, ConfigError, "root of a training"),
        (whole, "ckpts/global_step_10", {}, ConfigError, "inside of one"),
        (whole, "out", {"weights": [1]}, ConfigError, "positive number for each step"),
        (whole, "out", {"weights": [0, 1]}, ConfigError, "positive number"),
        (whole, "out", {"weights": [1, float("nan")]}, ConfigError, "positive number"),
        (whole, "out", {"weights": [1e308, 1e308]}, ConfigError, "positive number"),  # all shares 0
        (whole, "out", {"ema": 1.0}, ConfigError, "not between 0 and 1"),
        (whole, "out", {"role": "critic"}, CommitError, "no model of role critic"),
        ("10,40", "out", {}, ConfigError, "10 and 40 do not have the same .* embed.weight differ"),
        ("last=x,10", "out", {}, ConfigError, "'last=x' is unknown"),
        ([50, 60], "out", {}, ConfigError, "weight is torch.float8_e4m3fn, and its scale is ano"),
    ]:
        with pytest.raises(error, match=sentence):
            merge_steps(job.root, steps, tmp_path / out, **how)  # type: ignore[arg-type]
        assert steps_on_disk(tmp_path / "out") == []
    assert steps_on_disk(job.root) == [10, 20, 30, 40, 50, 60]
    shard = step_folder(job.root, 20) / "actor/model_world_size_2_rank_1.pt"
    flip_a_byte(shard, -3000)
    with pytest.raises(CommitError, match=f"{shard} is corrupted"):
        merge_steps(job.root, "10,20,30", tmp_path / "out")
    assert steps_on_disk(tmp_path / "out") == []
