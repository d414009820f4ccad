"""A root that this user may read and not write: everything reads it, and a save says what to do."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import Result

from tests.integration.fsdp.commits import CommitsHere
from tests.support.command import invoke
from tests.support.job import Job
from tests.support.models import configure
from tests.unit.conftest import Open
from trinity_sync import WeightReader
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import RootError
from trinity_sync.formats.hf_export import export_step
from trinity_sync.integrations.dcp import DcpSaver, StepReader
from trinity_sync.layout import step_folder
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import IDENTITY_FILE, read_identity
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.steps_in_use import lease_to_read, list_leases
from trinity_sync.weights.folder.reader import FolderReader
from trinity_sync.weights.folder.writer import WeightFolder

Make = Callable[[Path], Callable[[], None]]
CONFIG = configure(LlamaConfig, 8, 8)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


@pytest.fixture
def root(job: Job, read_only: Make, model: Any, tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "metadata/huggingface")
    for step in (1, 2):
        states = {"model": model.state_dict(), "optim": {"lr": 0.1 * step}}
        job.stage(step, states, metadata=tmp_path / "metadata")
        job.commit(step, "model", "optim", "metadata")
    read_only(job.root)
    return job.root


def test_a_coordinator_loads_and_its_first_save_says_what_to_do(
    root: Path, coordinator_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    saves = coordinator_of(trigger=CommitsHere(), job={"keep": "last=3"})
    assert saves.latest_step() == 2
    for _ in range(2):
        assert saves.load(2)["optim"] == {"lr": 0.2}
    with lease_to_read(root, 2, "a reader") as manifest:
        assert (manifest.step, list_leases(root)) == (2, [])
    assert "cannot remove" not in caplog.text
    assert caplog.text.count("cannot be written by this process") == 1
    with pytest.raises(RootError, match=r"cannot be written \(.*mount it for writing"):
        saves.save(3, {"model": {"w": torch.ones(3)}})
    coordinator_of(rank=1, world_size=2).latest_step()


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_and_a_root_without_an_identity_are_loaded_as_they_are(
    job: Job, read_only: Make, tmp_path: Path, copied: bool, settings: Settings
) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(3)}})
    root = tmp_path / "copy"
    shutil.copytree(job.root, root)
    if not copied:
        (root / IDENTITY_FILE).unlink()
    read_only(root)
    with CheckpointCoordinator(root, settings=settings, trigger=CommitsHere()) as saves:
        assert saves.load(1)["model"]["w"].tolist() == [1, 1, 1]
    assert read_identity(root) == (read_identity(job.root) if copied else "")


def test_a_root_without_steps_that_cannot_be_written_is_refused_at_the_start(
    job: Job, read_only: Make, coordinator_of: Open
) -> None:
    read_only(job.root)
    with pytest.raises(RootError, match="cannot be written"):
        coordinator_of(trigger=CommitsHere())


def test_a_root_that_becomes_writable_after_a_load_has_no_run_that_began_at_the_step(
    job: Job, read_only: Make, coordinator_of: Open
) -> None:
    job.commit_states(1, {"model": {"w": 1}})
    make_writable = read_only(job.root)
    saves = coordinator_of(trigger=CommitsHere())
    saves.load(1)
    make_writable()
    with pytest.raises(RootError, match="start again"):
        saves.save(2, {"model": {"w": 2}})


def test_a_step_of_dcp_is_loaded(job: Job, read_only: Make, coordinator_of: Open) -> None:
    writer = DcpSaver(coordinator_of(trigger=CommitsHere())).writer(1)
    state = {"w": torch.ones(3)}
    dcp.async_save(state, storage_writer=writer, async_stager=writer, no_dist=True).result(30)
    read_only(job.root)
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=StepReader(job.root, 1), no_dist=True)
    assert found["w"].tolist() == [1.0] * 3


def run(root: Path, command: str, *arguments: str) -> Result:
    env = {"TRINITY_SYNC_HOME": str(root.parent / "home")}
    return invoke(command, root, *arguments, env=env)


@pytest.mark.parametrize(
    "arguments",
    [("ls",), ("show", "2"), ("verify",), ("readers",), ("prune", "--dry-run"), ("report",)],
    ids=" ".join,
)
def test_commands_that_read_write_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)  # the report is written there
    done = run(root, *arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "arguments",
    [("prune", "--keep", "last=1", "--yes"), ("rewind", "1", "--yes"), ("pin", "1")],
    ids=" ".join,
)
def test_commands_that_write_say_what_to_do(root: Path, arguments: tuple[str, ...]) -> None:
    done = run(root, *arguments)
    assert done.exit_code == 1, done.output
    assert f"error: {root}/.trinity_sync/" in done.stderr
    assert "hint: run the command as a user who may write there" in done.stderr


def test_a_corrupted_step_is_reported_although_it_cannot_be_marked(
    job: Job, read_only: Make
) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(3)}})
    with (step_folder(job.root, 1) / "actor/model_world_size_1_rank_0.pt").open("r+b") as file:
        file.write(b"other")
    read_only(job.root)
    done = run(job.root, "verify")
    assert done.exit_code == 3, done.output
    assert "corrupted" in done.output


def test_a_step_is_exported_and_converted(root: Path, model: Any, tmp_path: Path) -> None:
    export_step(root, 2, to=tmp_path / "hf")
    found = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    done = invoke("export", "dcp", root, "2", tmp_path / "dcp")
    assert done.exit_code == 0, done.output


def test_a_step_is_copied_and_resumed_elsewhere(
    root: Path, read_only: Make, tmp_path: Path
) -> None:
    replicate(root, f"file://{tmp_path}/copies", 2)
    read_only(tmp_path / "copies")
    fetch(f"file://{tmp_path}/copies", None, tmp_path / "elsewhere")
    assert load_states(tmp_path / "elsewhere", 2, "actor")["optim"] == {"lr": 0.2}
    read_only(tmp_path / "elsewhere")
    assert not fetch(f"file://{tmp_path}/copies", 2, tmp_path / "elsewhere")[1]


def test_readers_of_weights_read(root: Path, model: Any, read_only: Make, tmp_path: Path) -> None:
    with WeightReader(root=root, name="explorer") as reader:
        assert asyncio.run(reader.wait_newer(timeout_s=250)).step == 2
        CONFIG.save_pretrained(tmp_path / "model")
        WeightFolder(tmp_path / "versions", tmp_path / "model").publish(reader)
    read_only(tmp_path / "versions")
    found = FolderReader(tmp_path / "versions").load()
    assert torch.equal(found["lm_head.weight"], model.state_dict()["lm_head.weight"])
