"""Shards of a committed step, written as a Hugging Face model."""

import ctypes
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, T5Config

from tests.support.disk import flip_a_byte
from tests.support.dying import end_of, in_a_process
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from tests.support.models import tiny
from tests.unit.formats.test_weight_folder import same
from tests.unit.tensors.test_deserialize import anonymous_memory
from trinity_sync.errors import CommitError, ConfigError, ExportError
from trinity_sync.formats import safetensors
from trinity_sync.formats.hf_export import export_step, fail_export_request, run_export_request
from trinity_sync.formats.hf_naming import Architecture, Naming
from trinity_sync.formats.safetensors import save_tensors
from trinity_sync.formats.shard_reader import SavedState
from trinity_sync.fs.atomic import TRUSTED
from trinity_sync.layout import step_folder
from trinity_sync.retention.prune import list_pending_exports
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

State = dict[str, torch.Tensor]


def shards(state: State, mesh_shape: tuple[int, ...]) -> list[State]:
    """What each rank of an FSDP mesh holds; torch's own process group, without other members."""
    names = ("fsdp",) if len(mesh_shape) == 1 else ("ddp", "fsdp")
    found: list[State] = []
    for rank in range(torch.Size(mesh_shape).numel()):
        world = torch.Size(mesh_shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
            mine = mesh.get_local_rank("fsdp")
            found.append({})
            for name, value in state.items():
                parts = list(value.chunk(mesh_shape[-1]))
                local = parts[mine] if mine < len(parts) else value[:0]
                found[-1][name] = DTensor.from_local(
                    local.clone(),
                    mesh,
                    placements,
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
        finally:
            dist.destroy_process_group()
    return found


Commit = Callable[..., None]


@pytest.fixture
def commit(job: Job, tmp_path: Path) -> Commit:
    """Commits a step with the shards of a model, its config and a tokenizer's file."""

    def save(ranks: list[State], config: Any, **other: Any) -> None:
        job.world_size = len(ranks)
        metadata = tmp_path / "metadata"
        shutil.rmtree(metadata, ignore_errors=True)
        (metadata / "huggingface").mkdir(parents=True)
        config.save_pretrained(metadata / "huggingface")
        (metadata / "huggingface/tokenizer.json").write_text('{"a": 1}')
        for rank, state in enumerate(ranks):
            small = metadata if rank == 0 else None
            job.stage(1, {"model": state}, rank=rank, metadata=small, **other)
        job.commit(1, "model", "metadata")

    return save


@pytest.fixture
def model(commit: Commit) -> Any:
    """A model of which step 1 has the shards of two ranks."""
    made = tiny()
    commit(shards(made.state_dict(), (2,)), made.config)
    return made


def weights(folder: Path) -> State:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2), (2, 3)])
def test_shards_of_every_mesh_make_the_model_again(
    job: Job, commit: Commit, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    model = tiny()
    commit(shards(model.state_dict(), mesh), model.config)
    export_step(job.root, 1, to=tmp_path / "out")
    assert same(weights(tmp_path / "out"), model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same(loaded.state_dict(), model.state_dict())
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"a": 1}'


def test_a_step_without_its_models_config_is_told_what_it_lacks_before_it_is_read(job: Job) -> None:
    job.commit_states(1, {"model": tiny().state_dict()})
    read: list[int] = []
    with pytest.raises(ExportError, match=r"no huggingface/config\.json in the step"):
        export_step(job.root, 1, on_progress=lambda nbytes, _: read.append(nbytes))
    assert read == []


def test_a_config_that_names_no_architecture_of_a_model_with_several_is_told_what_it_lacks(
    tmp_path: Path,
) -> None:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=17)
    config.save_pretrained(tmp_path)
    with pytest.raises(ExportError, match=r"t5 model does not say.*set config\.architectures"):
        Architecture(tmp_path)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert type(Architecture(tmp_path).shell).__name__ == "T5ForConditionalGeneration"


def test_an_export_into_the_step_joins_its_manifest(job: Job, model: Any) -> None:
    before = require_committed(job.root, 1)
    done = export_step(job.root, 1)
    assert done.folder == step_folder(job.root, 1) / "actor/huggingface"
    assert same(weights(done.folder), model.state_dict())
    manifest = require_committed(job.root, 1)
    assert {file.path for file in manifest.files} == {
        *(file.path for file in before.files),
        "actor/huggingface/model.safetensors",
    }
    assert [
        verdict.state for verdict in judge_steps(check_files(choose_files(job.root, step=1)))
    ] == ["valid"]
    file = done.folder / "model.safetensors"
    written_at = file.stat().st_mtime_ns
    assert export_step(job.root, 1) == done
    assert file.stat().st_mtime_ns == written_at
    several = export_step(job.root, 1, max_shard_bytes=4000)
    assert len(several.files) > 2
    assert not file.exists()
    assert same(weights(done.folder), model.state_dict())
    require_committed(job.root, 1)


def test_files_stay_below_their_size_and_an_index_names_them(
    job: Job, commit: Commit, tmp_path: Path
) -> None:
    model = tiny(layers=4)
    commit(shards(model.state_dict(), (2,)), model.config)
    export_step(job.root, 1, to=tmp_path / "out", max_shard_bytes=6000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    nbytes = sum(value.nbytes for value in model.state_dict().values())
    assert index["metadata"]["total_size"] == nbytes
    assert all(
        sum(value.nbytes for value in load_file(path).values()) <= 6000
        for path in (tmp_path / "out").glob("*.safetensors")
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same(loaded.state_dict(), model.state_dict())


def test_a_killed_export_resumes(
    job: Job, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(layers=4)
    commit(shards(model.state_dict(), (2,)), model.config)
    saved: list[str] = []

    def save_and_die(path: Path, tensors: State) -> None:
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(path.name)
        save_tensors(path, tensors)

    monkeypatch.setattr(safetensors, "save_tensors", save_and_die)
    export = partial(export_step, job.root, 1, to=tmp_path / "out", max_shard_bytes=6000)
    assert end_of(export) == -signal.SIGKILL
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    left = sorted((tmp_path / ".out.partial").glob("*.safetensors"))
    assert len(left) == 2
    left[1].write_bytes(b"torn")
    kept = left[0].stat().st_ino
    export()
    assert (tmp_path / "out" / left[0].name).stat().st_ino == kept
    assert same(weights(tmp_path / "out"), model.state_dict())
    assert not (tmp_path / ".out.partial").exists()


def test_whenever_a_second_export_is_killed_the_step_is_valid_and_can_be_exported(
    job: Job, model: Any, tmp_path: Path
) -> None:
    files = step_folder(job.root, 1) / "actor/huggingface"
    for die_before in itertools.count(1):
        export_step(job.root, 1, max_shard_bytes=12_000)
        again = partial(export_step, job.root, 1, max_shard_bytes=16_000)
        died = in_a_process(again, tmp_path, die_before=die_before)
        require_committed(job.root, 1)
        verdicts = judge_steps(check_files(choose_files(job.root, step=1)))
        assert [each.state for each in verdicts] == ["valid"]
        export_step(job.root, 1, max_shard_bytes=16_000)
        assert same(weights(files), model.state_dict())
        if died != die_before:
            break


@pytest.fixture
def freed_memory_goes_back() -> Iterator[None]:
    """Freed tensors that malloc keeps would look like tensors that are held."""
    mmap_threshold, usual_most = -3, 32 << 20
    malloc = ctypes.CDLL(None)
    malloc.mallopt(mmap_threshold, 1 << 20)
    yield
    malloc.mallopt(mmap_threshold, usual_most)


def test_memory_holds_one_file_of_the_result_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed_memory_goes_back: None
) -> None:
    torch.save({f"w{n}": torch.full((1 << 20,), float(n)) for n in range(50)}, tmp_path / "0.pt")
    seen = []

    def look(path: Path, tensors: State) -> None:
        seen.append(anonymous_memory() - before)
        save_tensors(path, tensors)

    monkeypatch.setattr(safetensors, "save_tensors", look)
    before = anonymous_memory()
    model = SavedState([tmp_path / "0.pt"])
    safetensors.write_model(
        safetensors.open_progress(tmp_path / "out", {}),
        model,
        {name: name for name in model.metas},
        Naming(None, frozenset(), fuses=False, config=b""),
        model.metas,
        max_bytes=20 << 20,
    )
    assert len(seen) == 10
    assert max(seen) < 40 << 20


@pytest.mark.parametrize("broken_off", [False, True])
def test_an_export_tells_of_the_bytes_that_it_compares_and_writes(
    job: Job, model: Any, tmp_path: Path, broken_off: bool
) -> None:
    if broken_off:
        export_step(job.root, 1, to=tmp_path / "out", max_shard_bytes=4000)
        (tmp_path / "out").rename(tmp_path / ".out.partial")
    told: list[tuple[int, int]] = []
    export_step(
        job.root,
        1,
        to=tmp_path / "out",
        max_shard_bytes=4000,
        on_progress=lambda done, whole: told.append((done, whole)),
    )
    compared = sum(file.nbytes for file in require_committed(job.root, 1).files if file.is_shard)
    written = sum(tensor.nbytes for tensor in weights(tmp_path / "out").values())
    assert sum(done for done, _ in told) == told[-1][1] == compared + written


def test_a_step_that_is_replaced_meanwhile_is_not_exported(
    job: Job, commit: Commit, tmp_path: Path
) -> None:
    model = tiny()
    open_run(job.root, "first", 0)
    ranks = shards(model.state_dict(), (2,))
    commit(ranks, model.config)
    open_run(job.root, "second", 0)
    for rank, state in enumerate(ranks):
        job.stage(1, {"model": {name: t * 0 for name, t in state.items()}}, rank=rank, run=2)
    shard = step_folder(job.root, 1) / "actor/model_world_size_2_rank_1.pt"
    with (
        when_opened(shard, lambda: job.commit(1, run=2)),
        pytest.raises(CommitError, match=r"step 1 .* run 2 has replaced it"),
    ):
        export_step(job.root, 1, to=tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()


def test_what_cannot_work_or_is_corrupted_is_a_sentence_and_changes_nothing(
    job: Job, model: Any, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    step = step_folder(job.root, 1)
    for arguments, error, sentence in [
        ({"to": full}, ConfigError, "not empty and not an earlier export"),
        ({"to": job.root}, ConfigError, "is or contains the job"),
        ({"to": step / "actor"}, ConfigError, "is part of a step"),
        ({"to": tmp_path / "x", "dtype": "int4"}, ConfigError, "is not keep, bf16"),
        ({"dtype": "bf16"}, ConfigError, "another FOLDER"),
        ({"to": tmp_path / "x", "role": "critic"}, CommitError, "no model of role critic"),
        ({"to": tmp_path / "x", "role": "../x"}, ConfigError, "may hold letters"),
    ]:
        with pytest.raises(error, match=sentence):
            export_step(job.root, 1, **arguments)  # type: ignore[arg-type]
    with pytest.raises(CommitError, match="not committed"):
        export_step(job.root, 7, to=tmp_path / "x")
    assert (full / "mine.txt").read_text() == "mine"
    assert not (tmp_path / "x").exists()
    require_committed(job.root, 1)
    flip_a_byte(step_folder(job.root, 1) / "actor/model_world_size_2_rank_1.pt", -3000)
    with pytest.raises(CommitError, match="is corrupted"):
        export_step(job.root, 1, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_request_keeps_its_step_until_it_ends(job: Job, commit: Commit) -> None:
    model = tiny()
    ranks = shards(model.state_dict(), (2,))
    commit(ranks, model.config, export="hf_model")
    assert list_pending_exports(job.root, require_committed(job.root, 1)) == ["actor"]
    in_the_way = job.root / ".trinity_sync/exports"
    in_the_way.write_text("")
    with pytest.raises(OSError, match=r"\.trinity_sync/exports"):
        run_export_request(job.root, 1, 1, "actor")
    failed = require_committed(job.root, 1)
    assert list_pending_exports(job.root, failed) == []
    assert failed.list_missing_exports() == ["actor"]  # for a retry
    commit(ranks, model.config)  # which asks for no export
    assert require_committed(job.root, 1).exports == failed.exports
    in_the_way.unlink()
    run_export_request(job.root, 1, 1, "actor")
    done = require_committed(job.root, 1)
    assert done.list_missing_exports() == []
    assert done.failed_exports == ()
    commit(ranks, model.config, export="hf_model")  # a retry keeps it
    after = require_committed(job.root, 1)
    assert after.exports == done.exports == {"actor": "hf_model"}
    assert after.list_missing_exports() == []


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_later_run_inherits_the_export_request_of_its_checkpoint_unless_that_has_failed(
    job: Job, commit: Commit, has_failed: bool
) -> None:
    model = tiny()
    ranks = shards(model.state_dict(), (2,))
    commit(ranks, model.config, export="hf_model")
    if has_failed:
        fail_export_request(job.root, 1, 1, "actor")
    open_run(job.root, "second", 1)
    for rank, state in enumerate(ranks):
        job.stage(1, {"model": state}, rank=rank, run=2, kind="state_dict")
    job.commit(1, run=2, kind="state_dict")
    if has_failed:
        assert require_committed(job.root, 1).list_missing_exports() == []
        return
    # by the first run's flow, whose step it was
    fail_export_request(job.root, 1, 1, "actor")
    assert list_pending_exports(job.root, require_committed(job.root, 1)) == ["actor"]
    run_export_request(job.root, 2, 1, "actor")
    assert require_committed(job.root, 1).is_exported("actor")


def test_states_that_are_no_fsdp_model_are_refused(
    job: Job, commit: Commit, tmp_path: Path
) -> None:
    model = tiny()
    ranks = shards(model.state_dict(), (2,))
    del ranks[1]["model.norm.weight"]
    commit(ranks, model.config)
    with pytest.raises(CommitError, match=r"of the 16 elements of model\.norm\.weight"):
        export_step(job.root, 1, to=tmp_path / "out")


OWN_MODEL = """
from pathlib import Path
from transformers import Qwen2ForCausalLM
Path({ran!r}).touch()
class OwnForCausalLM(Qwen2ForCausalLM):
    pass
"""


@pytest.mark.parametrize("theirs", ["", "modeling_own.py", "config.json"])
def test_code_of_a_model_is_imported_if_no_other_user_may_have_written_it(
    job: Job, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(tmp_path / "hf")
    model, ran = tiny(), tmp_path / "ran"
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    commit(shards(model.state_dict(), (2,)), model.config)
    folder = step_folder(job.root, 1) / "actor" / "huggingface"
    (folder / "modeling_own.py").write_text(OWN_MODEL.format(ran=str(ran)))
    with pytest.raises(ConfigError, match="has source files of its own"):
        export_step(job.root, 1, to=tmp_path / "out")
    assert not ran.exists()
    if theirs:
        (folder / theirs).chmod(0o666)
        with pytest.raises(ConfigError, match=f"{theirs} is not this user's alone"):
            export_step(job.root, 1, to=tmp_path / "out", trust_remote_code=True)
        assert not ran.exists()
        monkeypatch.setenv(TRUSTED, str(job.root))
    export_step(job.root, 1, to=tmp_path / "out", trust_remote_code=True)
    assert ran.exists()
    assert same(weights(tmp_path / "out"), model.state_dict())
