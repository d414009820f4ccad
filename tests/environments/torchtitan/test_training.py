"""TorchTitan's own trainer on CPU ranks, in an environment of its own (``make torchtitan``)."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conftest import environment
from tests.support.job import mapped_nbytes
from tests.support.states import differences
from tests.support.waiting import until
from trinity_sync.errors import ConfigError
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.stack.services import StackState
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.runs import list_runs

pytest.importorskip("torchtitan", reason="it has an environment of its own; see make torchtitan")
pytestmark = pytest.mark.timeout(600)

REPOSITORY = Path(__file__).parents[3]
OURS = ["--override.imports", "trinity_sync.integrations.torchtitan.use_trinity_sync"]
LOSS = re.compile(r"step: +(\d+) +loss: +([\d.]+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and a tokenizer, where trainings run."""
    folder = tmp_path_factory.mktemp("titan")
    program = "import sys, pathlib, tests.environments.torchtitan.train\n"
    program += "from tests.environments.torchtitan import tiny\n"
    program += "tiny.make_assets(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=REPOSITORY, check=True)
    return folder


def train(
    folder: Path, *options: str, ranks: int = 2, config: str = "tiny", fails: str = ""
) -> dict[int, str]:
    """Train with a checkpoint folder of options; return the loss of each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "tests.environments.torchtitan.train"]
    command += ["--module", "tests.environments.torchtitan.tiny", "--config", config, *options]
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    printed = done.stdout + done.stderr
    assert (done.returncode == 0) == (not fails), printed
    assert fails in printed, printed
    return {int(step): loss for step, loss in LOSS.findall(printed)}


def train_both(
    folder: Path, name: str, *options: str, each: Mapping[str, list[str]] = {}, **how: Any
) -> dict[int, str]:
    """Train with TorchTitan's manager and with ours; return the losses, which are the same."""
    plain, ours = (
        train(folder, *options, *each.get(kind, []), *more, "--checkpoint.folder", name, **how)
        for kind, name, more in (("plain", f"plain-{name}", []), ("ours", f"ours-{name}", OURS))
    )
    assert ours == plain
    return plain


def read(folder: Path) -> dict[str, object]:
    """Return what plain PyTorch reads of a folder of DCP."""
    file = folder.parent / f"{folder.name}.pt"
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=False)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[int, str]:
    """Losses of a training of two ranks that TorchTitan saves itself, to ``plain``."""
    return train(folder, "--checkpoint.folder", "plain")


@pytest.fixture(scope="module")
def resumed(folder: Path, stack: StackState) -> dict[int, str]:
    """Losses of one that is killed at step 6 and started again, saved to ``ours``."""
    train(folder, "--checkpoint.folder", "ours", config="dying", fails="SIGKILL")
    until(lambda: read_manifest(folder / "ours", 6), "the commit of step 6")
    return train(folder, "--checkpoint.folder", "ours", *OURS)


def test_ranks_killed_the_instant_after_a_save_resume_from_it_bit_equal(
    folder: Path, reference: dict[int, str], resumed: dict[int, str]
) -> None:
    assert [run.resumed_from for run in list_runs(folder / "ours")] == [0, 6]
    assert resumed == {step: reference[step] for step in range(7, 13)}
    saved = read(step_folder(folder / "ours", 12) / "actor")
    assert {"optimizer", "lr_scheduler", "dataloader", "train_state"} < saved.keys()
    assert differences(read(folder / "plain" / "step-12"), saved) == []


MORE = ["--training.steps", "14"]
WHOLE = [*MORE, "--checkpoint.no-initial-load-model-only", "--checkpoint.initial-load-path"]


def test_torchtitans_own_manager_goes_on_from_a_committed_step(
    folder: Path, reference: dict[int, str], resumed: dict[int, str]
) -> None:
    own = train(folder, "--checkpoint.folder", "plain", *MORE)
    step = step_folder(folder / "ours", 12) / "actor"
    assert own.keys() == {13, 14}
    assert train(folder, "--checkpoint.folder", "plain-from-ours", *WHOLE, str(step)) == own
    ended = [read(folder / name / "step-14") for name in ("plain", "plain-from-ours")]
    assert differences(*ended) == []


MESHES: dict[str, tuple[int, list[str]]] = {
    "one-rank": (1, []),
    "tensor-parallel": (2, ["--parallelism.tensor-parallel-degree", "2"]),
    "replicas": (2, ["--parallelism.data-parallel-replicate-degree", "2"]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_another_mesh_goes_on_as_with_torchtitans_own_manager(
    folder: Path, reference: dict[int, str], resumed: dict[int, str], mesh: str
) -> None:
    ranks, options = MESHES[mesh]
    options = [*options, "--checkpoint.exclude-from-loading", "dataloader"]
    saved = {"plain": "plain/step-12", "ours": "ours/global_step_12/actor"}
    each = {kind: [*WHOLE, str(folder / path)] for kind, path in saved.items()}
    assert train_both(folder, mesh, *options, each=each, ranks=ranks).keys() == {13, 14}
    ended = [folder / f"plain-{mesh}/step-14", folder / f"ours-{mesh}/global_step_14/actor"]
    assert differences(*map(read, ended)) == []


def test_a_step_that_is_only_loaded_trains_on_without_a_run_or_a_save(
    folder: Path, reference: dict[int, str], resumed: dict[int, str]
) -> None:
    options = ["--checkpoint.load-only", "--checkpoint.load-step", "10"]
    runs = list_runs(folder / "ours")
    only = train(folder, "--checkpoint.folder", "ours", *OURS, *options)
    assert only == {step: reference[step] for step in (11, 12)}
    assert list_runs(folder / "ours") == runs


def test_a_training_from_hugging_face_weights_ends_with_a_model_alone_as_by_torchtitan_itself(
    folder: Path, stack: StackState
) -> None:
    """As fine-tuning does: TorchTitan's defaults, in which the last step has no optimizer."""
    whole = ["--checkpoint.last-save-model-only", "--training.steps", "3"]
    train(folder, *whole, "--checkpoint.folder", "hf", "--checkpoint.last-save-in-hf")
    options = [*whole, "--checkpoint.export-dtype", "bfloat16", "--checkpoint.initial-load-in-hf"]
    options += ["--checkpoint.initial-load-path", str(folder / "hf" / "step-3")]
    options += ["--checkpoint.enable-first-step-checkpoint"]
    pinned = ["--checkpoint.async-mode", "async_with_pinned_mem"]
    train_both(folder, "tuned", *options, each={"ours": pinned})
    assert steps_on_disk(folder / "ours-tuned") == [1, 2, 3]
    for step in (1, 2, 3):
        saved = read(step_folder(folder / "ours-tuned", step) / "actor")
        assert differences(read(folder / "plain-tuned" / f"step-{step}"), saved) == []


EXPERTS = ["--parallelism.expert-parallel-degree", "2"]


@pytest.mark.parametrize(("last", "steps"), [(4, {1, 2, 3, 4}), (6, {5, 6})])
def test_experts_on_different_ranks_are_saved_and_resumed_as_by_torchtitan_itself(
    folder: Path, stack: StackState, last: int, steps: set[int]
) -> None:
    options = [*EXPERTS, "--training.steps", str(last)]
    assert train_both(folder, "experts", *options, config="experts").keys() == steps
    until(lambda: read_manifest(folder / "ours-experts", last), "the commit")
    saved = step_folder(folder / "ours-experts", last) / "actor"
    assert differences(read(folder / "plain-experts" / f"step-{last}"), read(saved)) == []


def test_experts_of_two_ranks_go_on_on_one(folder: Path, stack: StackState) -> None:
    """From the steps of the test above."""
    options = ["--training.steps", "8", "--checkpoint.exclude-from-loading", "dataloader"]
    saved = {"plain": "plain-experts/step-6", "ours": "ours-experts/global_step_6/actor"}
    each = {kind: [*WHOLE[len(MORE) :], str(folder / path)] for kind, path in saved.items()}
    losses = train_both(folder, "one", *options, each=each, ranks=1, config="experts")
    assert losses.keys() == {7, 8}


def test_a_seed_checkpoint_of_one_rank_begins_a_training_of_two(
    folder: Path, stack: StackState
) -> None:
    options = ["--training.steps", "2"]
    train_both(folder, "seed", *options, "--checkpoint.create-seed-checkpoint", ranks=1)
    train_both(folder, "seed", *options)
    assert [run.resumed_from for run in list_runs(folder / "ours-seed")] == [0, 0]


def test_a_save_that_fails_is_raised_at_the_end(folder: Path, stack: StackState) -> None:
    root = folder / "failing"
    root.mkdir()
    (root / "global_step_4").write_text("not a folder")
    why = "SaveFailedError"
    losses = train(
        folder, "--checkpoint.folder", root.name, *OURS, "--training.steps", "6", fails=why
    )
    assert 6 in losses
    assert read_manifest(root, 6)


@pytest.fixture
def group(tmp_path: Path, spool_folder: Path) -> Iterator[None]:
    """A process group of this process alone, without a stack."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    own = {"TRINITY_SYNC_SPOOL": str(spool_folder), "TRINITY_SYNC_HOME": str(tmp_path / "home")}
    with environment(own):
        yield
    dist.destroy_process_group()


def build(folder: Path, **settings: Any) -> Any:
    """Build the manager as TorchTitan does."""
    from trinity_sync.integrations.torchtitan import TrinitySyncCheckpointManager

    config = TrinitySyncCheckpointManager.Config(enable=True, folder="ckpts", **settings)
    return config.build(
        dataloader=None,
        model_parts=[torch.nn.Linear(2, 2)],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=object(),
        base_folder=str(folder),
    )


def test_steps_of_torchtitan_itself_in_the_same_folder_are_refused(
    tmp_path: Path, group: None
) -> None:
    (tmp_path / "ckpts" / "step-30").mkdir(parents=True)
    (tmp_path / "ckpts" / "step-30" / ".metadata").touch()
    with pytest.raises(ConfigError, match=r"up to step-30; set another checkpoint.folder, and"):
        build(tmp_path)


@pytest.mark.parametrize("load_only", [False, True])
def test_memory_for_saves_is_touched_unless_nothing_is_saved(
    tmp_path: Path, group: None, load_only: bool
) -> None:
    manager = build(tmp_path, load_only=load_only)
    manager._saves._stager.memory.run(looks=False)
    assert bool(mapped_nbytes(manager._saves.spool.slot("actor", "dcp", 0, 0))) != load_only
    manager.close()


def test_a_last_step_in_hugging_face_format_is_refused(tmp_path: Path, group: None) -> None:
    with pytest.raises(ConfigError, match="convert the last step with"):
        build(tmp_path, last_save_in_hf=True)


def test_another_checkpoint_manager_is_not_replaced() -> None:
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

    import tests.environments.torchtitan.train  # noqa: F401, TorchTitan on the CPU
    from trinity_sync.integrations.torchtitan import use_trinity_sync

    with pytest.raises(ConfigError, match=r"cannot replace TorchFTCheckpointManager\.Config"):
        use_trinity_sync(TorchFTCheckpointManager.Config())


def test_a_step_that_is_not_committed_is_not_loaded(tmp_path: Path, group: None) -> None:
    manager = build(tmp_path)
    (tmp_path / "ckpts" / "global_step_4" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointException, match="CommitError"):
        manager.load(4)
    assert not manager.load()
    manager.close()


def test_after_an_error_of_the_training_nothing_is_waited_for(tmp_path: Path, group: None) -> None:
    manager = build(tmp_path)  # without a stack nothing is committed
    manager.dcp_save({"w": torch.ones(2)}, manager._create_checkpoint_id(1))
    try:
        raise RuntimeError("as in TorchTitan's main")
    except RuntimeError:
        manager.close()
    assert read_manifest(tmp_path / "ckpts", 1) is None
