"""What `test_huggingface_ranks.py` runs on the ranks of a new process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integration.fsdp.commits import Fails
from tests.support.disk import flip_a_byte
from tests.support.states import copied, differences
from tests.trainers.local_saves import TOKENS, Taken, commit_here, commit_taken, make_gpt2
from tests.trainers.ranks import kill_all_ranks, killed_ranks, on_ranks, require_same, whole_state
from trinity_sync import CheckpointCoordinator, CommitError, ConfigError, SaveFailedError
from trinity_sync.formats.dcp import to_dcp
from trinity_sync.integrations.huggingface import TrinitySyncCallback
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.restore import load_states

STEPS, KILLED_AT = 8, 6  # four steps are an epoch


class KillAt(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == KILLED_AT:
            kill_all_ranks()


def make_trainer(
    folder: Path, kind: str, callbacks: list[TrainerCallback], **arguments: Any
) -> Trainer:
    torch.manual_seed(0)
    model = make_gpt2()
    if "lora" in kind:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))
    if "fsdp" in kind:
        arguments["fsdp"] = True  # version 2, and FULL_STATE_DICT for what Trainer itself saves
    given = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        **{"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, **arguments},
    )
    assert given.device == torch.device("cpu:0")
    # Trainer's torch.load refuses cpu:0, and so its own checkpoints on several CPU ranks
    vars(given)["_setup_devices"] = torch.device("cpu")
    if "fsdp" in kind:  # Accelerate knows no FSDP on CPU; the rest is what a GPU would do
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    return Trainer(model, given, train_dataset=data, eval_dataset=data, callbacks=callbacks)


class KeepWhole(TrainerCallback):
    """Gathers the whole state of each step that is saved, by PyTorch alone."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.states[state.global_step] = whole_state(parts["model"], parts["optimizer"])


def state_of(trainer: Trainer) -> dict[str, Any]:
    return copied(
        {
            "model": dict(trainer.model.state_dict()),
            "optimizer": trainer.optimizer.state_dict(),
            "schedule": trainer.lr_scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        }
    )


def train(
    folder: Path, spool: Path, kind: str, root: str, fate: str
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Train from the newest step, if there is one; killed, or to the end."""
    trigger = Taken(KILLED_AT, folder) if fate == "killed" else None
    saves = TrinitySyncCallback(folder / root, **commit_here(folder, spool, trigger))
    keep = KeepWhole()
    trainer = make_trainer(
        folder, kind, [saves, *([KillAt()] if fate == "killed" else [keep] * (fate == "whole"))]
    )
    newest = saves.latest()
    assert (newest is not None) == (fate == "resumed")
    if newest:
        assert Path(newest).name == f"checkpoint-{KILLED_AT}"
    else:
        torch.rand(dist.get_rank() + 1)  # each rank has its own dropout
    trainer.train(resume_from_checkpoint=newest)
    assert trainer.is_fsdp_enabled == ("fsdp" in kind)
    return state_of(trainer), keep.states


class Loaded(TrainerCallback):
    """Keeps the whole state that the training begins with, and ends it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.state = whole_state(parts["model"], parts["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        control.should_training_stop = True


def load(folder: Path, spool: Path, kind: str, root: str = "ckpts") -> dict[str, Any]:
    """Load the newest step on these ranks."""
    saves, loaded = TrinitySyncCallback(folder / root, **commit_here(folder, spool)), Loaded()
    trainer = make_trainer(folder, kind, [saves, loaded], save_strategy="no")
    trainer.train(resume_from_checkpoint=saves.latest())
    return loaded.state


def resume_bit_equal_after_a_kill(folder: Path, spool: Path, kind: str) -> None:
    whole = on_ranks(folder, train, folder, spool, kind, "whole", "whole")
    assert whole[0][0]["random"].tolist() != whole[1][0]["random"].tolist()
    killed_ranks(folder, train, folder, spool, kind, "ckpts", "killed")
    assert commit_taken(folder) == [KILLED_AT]
    require_one_replica(folder / "ckpts/global_step_6", kind)
    for world_size in (1, 3) if "ddp" in kind else (3,):
        for loaded in on_ranks(folder, load, folder, spool, kind, world_size=world_size):
            require_same(whole[0][1][KILLED_AT], loaded)
    if kind == "ddp-lora":
        ((_, alone),) = on_ranks(folder, train, folder, spool, kind, "alone", "whole", world_size=1)
        for loaded in on_ranks(folder, load, folder, spool, kind, "alone"):
            require_same(alone[STEPS], loaded)

    resumed = on_ranks(folder, train, folder, spool, kind, "ckpts", "resumed")
    for (before, _), (after, _) in zip(whole, resumed, strict=True):
        assert len(before["losses"]) == STEPS
        require_same(before, after)
    assert steps_on_disk(folder / "ckpts")[-2:] == [KILLED_AT, STEPS]


def require_one_replica(step: Path, kind: str) -> None:
    """A replicated state is written once; of shards each rank writes its own."""
    names = {path.name for path in (step / "actor").iterdir()}
    if "ddp" in kind:
        states = {"model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"}
        assert names == states | ({"huggingface"} if kind == "ddp" else set())
    else:
        assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    attached = {path.name for path in (step / "attachments").rglob("*.*")}
    assert {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"} <= attached


def fail(folder: Path, spool: Path, kind: str) -> None:
    saves = TrinitySyncCallback(folder / "ckpts", **commit_here(folder, spool, Fails()))
    with pytest.raises(SaveFailedError, match="the disk is full"):
        make_trainer(folder, kind, [saves], max_steps=2).train()


def find_corruption(folder: Path, spool: Path, kind: str) -> str:
    saves = TrinitySyncCallback(folder / "ckpts", **commit_here(folder, spool))
    make_trainer(folder, kind, [saves], max_steps=2).train()
    if dist.get_rank() == 1:
        flip_a_byte(next((folder / "ckpts/global_step_2/actor").glob("*_0.*t*")), -20)
    dist.barrier()
    told = find_refusal(folder, spool)
    if kind == "fsdp":
        told += find_refusal(folder.with_name("ddp-2"), spool)
    return told


def find_refusal(folder: Path, spool: Path) -> str:
    """Return why the newest step is not loaded."""
    try:
        TrinitySyncCallback(folder / "ckpts", **commit_here(folder, spool)).latest()
    except (CommitError, ConfigError) as error:
        return str(error)
    return ""


def refuse_fsdp1(folder: Path, spool: Path) -> None:
    saves = TrinitySyncCallback(folder / "ckpts", **commit_here(folder, spool))
    version = {"version": 1, "sync_module_states": False}  # which would need a GPU
    with pytest.raises(ConfigError, match=r"with FSDP1 \(set fsdp_config=.'version': 2.\)"):
        make_trainer(folder, "fsdp", [saves], fsdp_config=version)


def end_with_errors_on_all_ranks(folder: Path, spool: Path) -> None:
    for kind in ("ddp", "fsdp"):
        on_ranks(folder, fail, folder / f"{kind}-1", spool, kind)
        for told in on_ranks(folder, find_corruption, folder / f"{kind}-2", spool, kind):
            assert "is corrupted" in told
            refusal = "has a replicated state, and this training has a sharded state (FSDP)"
            assert (refusal in told) == (kind == "fsdp")
    on_ranks(folder, refuse_fsdp1, folder, spool)


def train_after_latest(folder: Path, spool: Path) -> dict[str, Any]:
    """With FSDP2 on one rank, which asks for the newest step before there is a Trainer."""
    saves = TrinitySyncCallback(folder / "ckpts", **commit_here(folder, spool))
    newest = saves.latest()
    assert newest is None
    make_trainer(folder, "fsdp", [saves], max_steps=2).train(resume_from_checkpoint=newest)
    loaded = load(folder, spool, "fsdp")
    names = {path.name for path in (folder / "ckpts/global_step_2/actor").iterdir()}
    assert names == {".metadata", "__0_0.distcp"}
    return loaded


def know_fsdp_with_the_trainer(folder: Path, spool: Path) -> None:
    (loaded,) = on_ranks(folder, train_after_latest, folder, spool, world_size=1)
    assert loaded["optimizer"]


# ------------------------------------------------------------ Accelerate without Trainer


def make_accelerator(kind: str) -> Accelerator:
    PartialState(cpu=True)
    plugin = None
    if kind == "fsdp":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        PartialState._shared_state["device"] = torch.device("cpu")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, fsdp_plugin=plugin)


class Prepared:
    """A model and its optimizer as Accelerate prepares them for these ranks."""

    def __init__(self, accelerator: Accelerator, seed: int = 0) -> None:
        self.accelerator = accelerator
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def advance(self) -> None:
        for _ in range(2):
            loss = self.model(torch.ones(2, 6) + dist.get_rank()).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def whole(self) -> dict[str, Any]:
        return whole_state(self.model, self.optimizer.optimizer)


def accelerate_alone(folder: Path, spool: Path, kind: str) -> tuple[list[str], bool]:
    """Save at a step, train on, and train from the step again; return what differs."""
    accelerator = make_accelerator(kind)
    trained = Prepared(accelerator)
    trained.advance()
    whole = trained.whole()
    if dist.get_rank() == 0:
        torch.save(whole, folder / "expected.pt")
    arguments = commit_here(folder, spool)
    with CheckpointCoordinator.of_process_group(folder / "ckpts", **arguments) as saves:
        saves.save(2, trained.state())
    trained.advance()
    expected = copied(trained.state())

    again = Prepared(accelerator)
    saves = CheckpointCoordinator.of_process_group(folder / "ckpts", **commit_here(folder, spool))
    again.load(saves.load(2))
    saves.close()
    again.advance()
    sharded = any(isinstance(each, DTensor) for each in again.model.parameters())
    return differences(expected, copied(again.state())), sharded


def accelerate_on_other_ranks(folder: Path, kind: str) -> list[str]:
    """Load what two ranks saved, under FSDP2 as DCP; return what differs."""
    loaded = Prepared(make_accelerator(kind), seed=1)
    loaded.advance()  # DCP fills a state that is there
    state = loaded.state()
    if kind == "fsdp":
        dcp.load(state, checkpoint_id=folder / "dcp")
    else:
        state = load_states(folder / "ckpts", 2, "actor", rank=0, world_size=2)
    loaded.load(state)
    return differences(torch.load(folder / "expected.pt", weights_only=False), loaded.whole())


def save_what_accelerate_has_prepared(folder: Path, spool: Path) -> None:
    for kind in ("ddp", "fsdp"):
        (folder / kind).mkdir()
        found = on_ranks(folder, accelerate_alone, folder / kind, spool, kind)
        assert found == [([], kind == "fsdp")] * 2, found
        if kind == "fsdp":
            to_dcp(folder / kind / "ckpts", 2, folder / kind / "dcp")
        other = on_ranks(folder, accelerate_on_other_ranks, folder / kind, kind, world_size=3)
        assert other == [[], [], []], other
