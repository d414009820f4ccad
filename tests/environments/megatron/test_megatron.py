"""Real Megatron on gloo ranks saves through slots, and resumes as if it had never stopped.

The references are the losses of the training that went on, and checkpoints that veRL's own manager
wrote at the same steps.
"""

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.environments.megatron.cpu import megatron_on_cpu
from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.ranks import on_ranks
from tests.support.disk import flip_a_byte
from tests.support.states import differences
from tests.support.waiting import until
from tests.trainers.local_saves import replace_files
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.errors import CommitError, ConfigError, SaveFailedError, SpoolError
from trinity_sync.formats.dcp import to_dcp
from trinity_sync.formats.hf_export import export_step
from trinity_sync.formats.merge import merge_steps
from trinity_sync.layout import attaching_folder, step_folder
from trinity_sync.stack.services import StackState
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

STEPS = (1, 2, 3)
FOLDERS = ("model", "optimizer", "extra")
TENSOR_PARALLEL, DATA_PARALLEL = 2, 1

Run = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call a function on ranks with Megatron on the CPU; its first argument is the job's root."""

    def run(program: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
        return on_ranks(
            _with_megatron,
            program,
            tmp_path / "ckpts",
            *arguments,
            scratch=tmp_path,
            world_size=world_size,
            preloaded="tests.environments.megatron.preloaded",
        )

    return run


def _with_megatron(program: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(1)
    with megatron_on_cpu():
        return program(*arguments)


def make_trained(*sizes: int, **named: Any) -> Any:
    from tests.environments.megatron.training import Trained

    return Trained(*sizes, **named)


def make_manager(trained: Any, saves: Any, **named: Any) -> Any:
    from trinity_sync.integrations.verl.megatron import MegatronCheckpointManager

    return trained.make_manager(MegatronCheckpointManager, coordinator=saves, **named)


def make_verls_manager(trained: Any, **named: Any) -> Any:
    from trinity_sync.integrations.verl.megatron import VerlMegatronCheckpointManager

    return trained.make_manager(VerlMegatronCheckpointManager, **named)


def actor(root: Path, step: int) -> str:
    return str(root / f"global_step_{step}" / "actor")


def train_and_save(
    root: Path, tensor: int, *, distributed: bool = True, **sizes: int
) -> list[float]:
    """Train three steps and save each, also by veRL; return the losses of two more steps."""
    trained = make_trained(tensor, distributed=distributed, **sizes)
    with coordinator_of(root) as saves:
        ours, theirs = make_manager(trained, saves), make_verls_manager(trained)
        for step in STEPS:
            trained.step()
            theirs.save_checkpoint(actor(root.parent / "theirs", step), global_step=step)
            staged = ours.save_checkpoint(actor(root, step), global_step=step)
            assert set(staged.components) >= {"model", "optim", "extra_state"}
            assert ours.save_checkpoint(actor(root, step), global_step=step) is None
        losses = [trained.step(), trained.step()]
        ours.wait_on_save_thread()
        assert saves.latest_step() == STEPS[-1]
        assert saves.latest_step("state_dict") is None  # readers of weights do not understand it
    return losses


def save_and_resume(root: Path, tensor: int, **sizes: int) -> None:
    losses = train_and_save(root, tensor, **sizes)
    trained = make_trained(tensor, seed=1, **sizes)
    with coordinator_of(root) as saves:
        trained.load(make_manager(trained, saves), actor(root, saves.latest_step()))
        assert saves.run == 2
        assert [trained.step(), trained.step()] == losses
    trained = make_trained(tensor, seed=2, **sizes)
    trained.load(make_verls_manager(trained), actor(root, STEPS[-1]))
    assert [trained.step(), trained.step()] == losses
    for step in STEPS:
        compare(actor(root.parent / "theirs", step), actor(root, step), FOLDERS)
    (verified,) = judge_steps(check_files(choose_files(root, step=STEPS[-1])))
    assert verified.state == "valid"


def resume_with(
    root: Path,
    saved: dict[str, int],
    loaded: dict[str, int],
    contents: tuple[str, ...] = ("model", "optimizer"),
) -> None:
    """Load with another parallelism, and compare with what veRL saves of what was loaded."""
    train_and_save(root, **saved, distributed=False)
    trained = make_trained(**loaded, seed=1, distributed=False)
    with coordinator_of(root) as saves:
        manager = make_manager(trained, saves, contents=contents)
        trained.load(manager, actor(root, STEPS[-1]))
    again = str(root.parent / "again" / "actor")
    theirs = make_verls_manager(trained, contents=contents)
    theirs.save_checkpoint(again, global_step=STEPS[-1])
    compare(actor(root, STEPS[-1]), again, contents)


def compare(one: str, other: str, names: tuple[str, ...]) -> None:
    """Require that checkpoints in two folders have the same content, bit for bit."""
    for name in names:
        a, b = read(one, name), read(other, name)
        assert len(a) > 1
        assert differences(a, b, f"{one} {name}") == []


def read(folder: str, name: str) -> dict[str, Any]:
    """Return all that a folder of ``dist_checkpointing`` holds, by key, as one rank loads it."""
    from megatron.core import dist_checkpointing

    path = str(Path(folder) / name / "dist_ckpt")
    found: dict[str, Any] = dist_checkpointing.load_plain_tensors(path)
    index = FileSystemReader(path).read_metadata()
    for of, at in (index.storage_data or {}).items():
        if isinstance(index.state_dict_metadata[of.fqn], BytesStorageMetadata):
            content = (Path(path) / at.relative_path).read_bytes()[at.offset :][: at.length]
            found[of.fqn] = torch.load(io.BytesIO(content), weights_only=False)
    found["common"] = dist_checkpointing.load_common_state_dict(path)
    return found


@pytest.mark.parametrize(
    "tensor", [TENSOR_PARALLEL, pytest.param(DATA_PARALLEL, marks=pytest.mark.slow)]
)
def test_a_training_resumes_bit_for_bit_from_steps_that_equal_verls_own(
    run: Run, tensor: int
) -> None:
    run(save_and_resume, tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"pipeline": 2}, {"pipeline": 2, "virtual": 2, "layers": 4}, {"expert": 2}],
    ids=["pipeline", "interleaved", "expert"],
)
def test_other_parallelisms_resume_bit_for_bit_from_steps_that_equal_verls_own(
    run: Run, sizes: dict[str, int]
) -> None:
    run(partial(save_and_resume, **sizes), 1)


def save_gathered(root: Path) -> None:
    train_and_save(root, TENSOR_PARALLEL, reshardable=True)
    for step in STEPS:
        compare(actor(root.parent / "theirs", step), actor(root, step), FOLDERS)


@pytest.mark.slow  # to load it, Megatron needs the Adam of Transformer Engine
def test_an_optimizer_that_is_gathered_is_saved_as_by_verl(run: Run) -> None:
    run(save_gathered)


TENSOR = {"tensor": TENSOR_PARALLEL}
DATA = {"tensor": DATA_PARALLEL}
PIPELINE = {"tensor": 1, "pipeline": 2}
LAYERS = {**PIPELINE, "layers": 4}
EXPERTS_ON = {n: {"tensor": 1, "expert": n, "experts": 4} for n in (1, 2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(TENSOR, DATA, id="tensor-data"),
        pytest.param(DATA, TENSOR, id="data-tensor"),
        pytest.param(PIPELINE, TENSOR, id="pipeline-tensor"),
        pytest.param(TENSOR, PIPELINE, id="tensor-pipeline"),
        pytest.param(LAYERS | {"virtual": 2}, LAYERS, id="interleaved-pipeline"),
    ],
)
def test_a_step_is_loaded_with_another_parallelism_bit_for_bit(
    run: Run, saved: dict[str, int], loaded: dict[str, int]
) -> None:
    run(resume_with, saved, loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "contents"),
    [
        (2, 4, ("model", "optimizer")),
        (4, 2, ("model", "optimizer")),
        (4, 1, ("model",)),  # Megatron has one optimizer without expert parallelism, two with it
        (1, 4, ("model",)),
    ],
)
def test_experts_are_loaded_with_another_expert_parallelism_bit_for_bit(
    run: Run, saved: int, loaded: int, contents: tuple[str, ...]
) -> None:
    sizes = EXPERTS_ON[saved], EXPERTS_ON[loaded]
    run(resume_with, *sizes, contents, world_size=4)


def save_what_changes(root: Path) -> None:
    """Save sharded state dicts of another structure each time; some cannot be saved."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from trinity_sync.integrations.dcp.planned_file import PlannedFile
    from trinity_sync.integrations.megatron import DistCheckpointSaver

    rank, planned = dist.get_rank(), []
    plan = PlannedFile.plan

    def note(file: PlannedFile, *arguments: Any) -> Any:
        laid_out = plan(file, *arguments)
        planned.append(Path(laid_out.name).parent.name)
        return laid_out

    def shard(key: str, number: float) -> Any:
        return ShardedTensor.from_rank_offsets(key, torch.full((3,), number + rank), (0, rank, 2))

    def break_down() -> Any:
        if rank:
            raise MemoryError("in a factory")
        return {"model": {"a": shard("a", 0)}}

    def no_elements() -> Any:
        return ShardedTensor.from_rank_offsets("e", torch.zeros(0), (0, rank, 2))

    def unpicklable() -> Any:
        return ShardedObject("object", (lambda: None) if rank else 0, (2,), (rank,))

    def model(number: float) -> Any:
        return {"model": {"a": shard("a", number)}}

    saved: dict[int, tuple[Callable[[], Any], list[str]]] = {  # with the folders that are planned
        1: (lambda: {**model(0), "optim": {"number": 1}}, ["model", "optim"]),
        2: (lambda: {**model(1), "optim": {"number": 2}}, []),
        3: (lambda: {"model": {"a": shard("a", 2), "b": shard("b", 5)}}, ["model"]),
        # rank 1 has nothing of the optimizer, and another order
        4: (lambda: {"optim": {} if rank else {"number": 4}, **model(3)}, ["model"]),
    }
    failing: dict[int, tuple[Callable[[], Any], str]] = {
        5: (lambda: {"model": {"a": shard("a", 3)} | ({"b": shard("b", 5)} if rank else {})}, "b"),
        6: (lambda: {"model": {"a": shard("a", 4), "b": unpicklable()}}, "rank 1 cannot pickle"),
        7: (break_down, r"rank 1 cannot collect its part: MemoryError\('in a factory'\)"),
        8: (lambda: {"model": {"e": no_elements()}}, "ZeroDivisionError"),
        9: (lambda: {**model(0), "optim": {"f": lambda: None}}, "rank 0 cannot collect its part"),
        10: (lambda: {**model(0), "other": {"a": 1}}, "other has no folder"),
    }
    saves = coordinator_of(root)
    saver = DistCheckpointSaver(saves, {"model": "model", "optim": "optim"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedFile, "plan", note)
        metadata = {"group": dist.group.WORLD, "kind": "test"}  # of which the group is left out
        for step, (collect, plans) in saved.items():
            planned.clear()
            small = {"note": b"small"}
            staged = saver.save(step, collect, files=small, content_metadata=metadata)
            assert not staged.failure
            assert planned == plans
        for step, (collect, why) in failing.items():
            failure = saver.save(step, collect).failure
            assert re.search(f"step {step}, role actor: nothing was submitted.*{why}", failure)
        assert not saver.save(11, lambda: model(5)).failure
    with pytest.raises(SaveFailedError) as failed:
        saves.wait_all(250)
    assert str(failed.value).count("nothing was submitted") == len(failing)
    for step, number in ((1, 0), (2, 1), (3, 2), (4, 3), (11, 5)):
        found = dist_checkpointing.load_plain_tensors(f"{actor(root, step)}/model")
        assert found["a"].tolist() == [*[number] * 3, *[number + 1] * 3]
        assert ("b" in found) == (step == 3)
    for step in (1, 2, 4):
        common = dist_checkpointing.load_common_state_dict(f"{actor(root, step)}/optim")
        assert common == {"number": step, "content_metadata": {"kind": "test"}}
        assert Path(actor(root, step), "note").read_bytes() == b"small"
    assert not Path(actor(root, 3), "optim").exists()
    saves.close()


def test_ranks_plan_again_when_the_structure_changes_and_refuse_missing_shards(run: Run) -> None:
    run(save_what_changes)


@contextmanager
def replaced_before_megatron_reads(folder: Path) -> Iterator[None]:
    """Give the names of compared files to others, of the same sizes, before Megatron's loader."""
    from trinity_sync.integrations.verl.megatron import VerlMegatronCheckpointManager

    load = VerlMegatronCheckpointManager.load_checkpoint

    def load_later(*arguments: Any) -> None:
        if dist.get_rank() == 0:
            replace_files(folder, "**/*.*")
        dist.barrier()
        load(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerlMegatronCheckpointManager, "load_checkpoint", load_later)
        yield


def load_corrupted(root: Path) -> None:
    trained = make_trained(DATA_PARALLEL)
    with coordinator_of(root) as saves:
        manager = make_manager(trained, saves)
        for step in (1, 2):
            trained.step()
            manager.save_checkpoint(actor(root, step), global_step=step)
    if dist.get_rank() == 0:
        flip_a_byte(Path(actor(root, 2), "optimizer", "dist_ckpt", "__1_0.distcp"), -20)
    dist.barrier()
    with coordinator_of(root) as saves:
        manager = make_manager(trained, saves)
        with pytest.raises(CommitError, match=r"optimizer/dist_ckpt/__1_0\.distcp is corrupted"):
            manager.load_checkpoint(actor(root, 2))
        manager.load_checkpoint(actor(root, 1))
        assert saves.run == 2
        with pytest.raises(CommitError, match="it was saved by Megatron, load it by Megatron"):
            saves.load(1)
        for read in (
            partial(to_dcp, root, 1, root.parent / "dcp"),
            partial(export_step, root, 1),
            partial(merge_steps, root, "1,2", root.parent / "merges"),
        ):
            with pytest.raises(CommitError, match="Face model of it: python -m verl"):
                read()
        with replaced_before_megatron_reads(Path(actor(root, 1))):
            manager.load_checkpoint(actor(root, 1))
    if os.getuid() == 0:
        if dist.get_rank() == 0:
            os.chown(Path(actor(root, 1), "extra", "dist_ckpt", "common.pt"), 12345, 12345)
        dist.barrier()
        with coordinator_of(root) as saves:
            manager = make_manager(trained, saves)
            with pytest.raises(CommitError, match=r"common\.pt may have been written by another"):
                manager.load_checkpoint(actor(root, 1))


def test_a_corrupted_file_is_refused_on_all_ranks_and_another_step_loads(run: Run) -> None:
    run(load_corrupted)


def load_what_does_not_fit(root: Path) -> None:
    from tests.environments.megatron import training

    trained = training.Trained(DATA_PARALLEL)
    with coordinator_of(root) as saves:
        trained.step()
        make_manager(trained, saves).save_checkpoint(actor(root, 1), global_step=1)
    with pytest.MonkeyPatch.context() as patch:
        sizes = partial(training.TransformerConfig, hidden_size=128)
        patch.setattr(
            training, "TransformerConfig", lambda **given: sizes(**{**given, **sizes.keywords})
        )
        other = training.Trained(DATA_PARALLEL, seed=1)
    before = [each.detach().clone() for each in other.model.parameters()]
    refused = pytest.raises(ConfigError, match=r"holds another model: .* has the shape")
    with coordinator_of(root) as saves, refused:
        make_manager(other, saves).load_checkpoint(actor(root, 1))
    assert all(map(torch.equal, before, other.model.parameters()))


def test_nothing_of_a_step_of_another_model_is_loaded(run: Run) -> None:
    run(load_what_does_not_fit)


def fail_on_one_rank(root: Path) -> None:
    """Save while rank 0 cannot write its small files, and while rank 1 has no shared memory."""
    rank, trained = dist.get_rank(), make_trained(DATA_PARALLEL)
    trained.step()
    saves = coordinator_of(root)
    manager = make_manager(trained, saves)

    def break_down(*_: Any, **__: Any) -> None:
        raise SpoolError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_save_transformer_config", break_down)
        with pytest.raises(ConfigError, match=r"role actor cannot be saved: .*the disk is full"):
            manager.save_checkpoint(actor(root, 1), global_step=1)
    manager.save_checkpoint(actor(root, 1), global_step=1)
    manager.wait_on_save_thread()
    contents = json.loads(Path(actor(root, 1), "ckpt_contents.json").read_text())
    assert contents["contents"]["model"]["path"] == "model/dist_ckpt"
    assert Path(actor(root, 1), "model", "huggingface", "config.json").exists()

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(saves._stager, "lay_out", break_down)
        staged = manager.save_checkpoint(actor(root, 2), global_step=2)
    assert bool(staged.failure) == bool(rank)
    assert manager.save_checkpoint(actor(root, 2), global_step=2) is None  # on all ranks
    # not closed, as the commit waits for rank 1's shards in vain


def test_what_fails_on_one_rank_does_not_hang_the_others(run: Run) -> None:
    run(fail_on_one_rank)


def make_unsupported_managers(root: Path) -> None:
    trained = make_trained(DATA_PARALLEL)
    named: dict[str, dict[str, Any]] = {
        "use_megatron_fsdp": {"use_megatron_fsdp": True},
        r"adapters \(PEFT\)": {"peft_cls": object(), "bridge": object()},
        "hf_model in checkpoint.save_contents": {"contents": ["hf_model"], "bridge": object()},
    }
    for name, arguments in named.items():
        with pytest.raises(ConfigError, match=name):
            make_manager(trained, None, **arguments)


def test_what_is_not_supported_is_refused_when_the_engine_starts(run: Run) -> None:
    run(make_unsupported_managers)


def save_by_the_switch(root: Path) -> None:
    """Save and load with what veRL's engine makes once the switch is on."""
    from verl.workers.engine.megatron import transformer_impl

    import trinity_sync.integrations.verl.switch  # noqa: F401, which patches modules
    from trinity_sync.integrations.verl.driver import get_manager

    trained = make_trained(TENSOR_PARALLEL)
    manager = trained.make_manager(transformer_impl.MegatronCheckpointManager)
    manager._coordinator = saves = coordinator_of(root)
    attaching = attaching_folder(root) / "random"
    if dist.get_rank() == 0:
        step_folder(attaching, 1).mkdir(parents=True)
        (step_folder(attaching, 1) / "data.pt").write_bytes(b"position of the dataloader")
    trained.step()
    manager.save_checkpoint(actor(attaching, 1), global_step=1)
    get_manager(SimpleNamespace(checkpoint_mananager=manager)).wait_on_save_thread()
    saves.close()
    manager._coordinator = saves = coordinator_of(root)
    trained.load(manager, actor(root, 1))
    dist.barrier()
    position = step_folder(root, 1) / "data.pt"
    assert position.read_bytes() == b"position of the dataloader"
    assert read_manifest(root, 1).find_file(position.name)
    assert saves.run == 2
    saves.close()


def test_the_switch_commits_the_position_of_the_dataloader_with_megatrons_states(run: Run) -> None:
    run(save_by_the_switch)


def save_and_die(root: Path, losses: Path) -> None:
    """Save a step on the stack, write the losses of two more steps, and die without closing."""
    trained = make_trained(TENSOR_PARALLEL)
    trained.step()
    saves = CheckpointCoordinator.of_process_group(root)
    make_manager(trained, saves).save_checkpoint(actor(root, 1), global_step=1)
    losses.with_suffix(f".{dist.get_rank()}").write_text(str([trained.step(), trained.step()]))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume_the_killed(root: Path) -> str:
    trained = make_trained(TENSOR_PARALLEL, seed=1)
    with CheckpointCoordinator.of_process_group(root) as saves:
        trained.load(make_manager(trained, saves), actor(root, 1))
        return str([trained.step(), trained.step()])


@pytest.mark.slow
def test_ranks_killed_after_a_save_resume_bit_for_bit_from_its_commit(
    run: Run, stack: StackState, stack_settings: Settings, tmp_path: Path
) -> None:
    root, losses = tmp_path / "ckpts", tmp_path / "losses"
    with pytest.raises(pytest.fail.Exception, match="died without an answer"):
        run(save_and_die, losses)
    until(lambda: read_manifest(root, 1), "the commit of step 1")
    assert run(resume_the_killed) == [
        losses.with_suffix(f".{rank}").read_text() for rank in range(2)
    ]
