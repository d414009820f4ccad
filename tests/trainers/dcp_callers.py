"""Callers of DCP that know nothing of trinity_sync, on two gloo ranks with its switch for DCP.

The callers of other projects are written here after the sequence of their calls.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from tests.support.disk import flip_a_byte
from tests.support.savers import await_that
from tests.support.states import copied, differences
from tests.trainers.ranks import kill_all_ranks, killed_ranks, on_ranks, require_same, whole_state
from trinity_sync.layout import steps_on_disk

RECORD = ".trinity_sync.json"


class AppState(Stateful):
    """Model and optimizer, as in PyTorch's recipe, which prime-rl and slime follow."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def train(steps: int, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        advance(model, optimizer)
    return model, optimizer


def advance(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 6) + dist.get_rank()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def switched(program: Callable[..., Any], out: Path, spool: Path, *arguments: Any) -> Any:
    """Run a program in this rank, with the switch as its first import."""
    os.environ.update(
        TRINITY_SYNC_ROOT=str(out / "saves"),
        TRINITY_SYNC_SPOOL=str(spool),
        TRINITY_SYNC_HOME=str(out / "home"),
        TRINITY_SYNC_SAVER="auto",
    )
    import trinity_sync.integrations.dcp.switch  # noqa: F401

    return program(out, *arguments)


# ------------------------------------------------------------ callers


def save_like_prime_rl(out: Path, steps: int) -> dict[str, Any]:
    """Files of each rank first, then one synchronous call; old folders are removed."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    model, optimizer = train(0)
    for step in range(1, steps + 1):
        advance(model, optimizer)
        path = out / f"step_{step}" / "trainer"
        (path / "dataloader").mkdir(parents=True, exist_ok=True)
        torch.save({"at": step}, path / "dataloader" / f"rank_{dist.get_rank()}.pt")
        dcp_save({"app": AppState(model, optimizer)}, checkpoint_id=path)
        assert (path / ".metadata").exists()
        dist.barrier()
        if step > 1 and dist.get_rank() == 0:
            shutil.rmtree(out / f"step_{step - 1}")
    return whole_state(model, optimizer)


def load_like_prime_rl(out: Path, step: int) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    path = out / f"step_{step}" / "trainer"
    model, optimizer = train(1, seed=1)
    dcp_load(state_dict={"app": AppState(model, optimizer)}, checkpoint_id=path)
    assert torch.load(path / "dataloader" / f"rank_{dist.get_rank()}.pt") == {"at": step}
    return whole_state(model, optimizer)


def save_like_slime(out: Path, steps: int) -> dict[str, Any]:
    """One synchronous call into a folder that rank 0 makes; its small files and tracker later."""
    model, optimizer = train(0)
    for step in range(1, steps + 1):
        advance(model, optimizer)
        folder = out / f"iter_{step:07d}"
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=str(folder))
        if dist.get_rank() == 0:
            torch.save({"torch": torch.get_rng_state()}, folder / "rng.pt")
            (folder / "meta.json").write_text(json.dumps({"iteration": step}))
            (out / "latest_checkpointed_iteration.txt").write_text(str(step))
        dist.barrier()
    return whole_state(model, optimizer)


def load_like_slime(out: Path) -> dict[str, Any]:
    step = int((out / "latest_checkpointed_iteration.txt").read_text())
    folder = out / f"iter_{step:07d}"
    model, optimizer = train(1, seed=1)
    dcp.load(state_dict={"app": AppState(model, optimizer)}, checkpoint_id=str(folder))
    assert json.loads((folder / "meta.json").read_text()) == {"iteration": step}
    return whole_state(model, optimizer)


def prepare_with_accelerate(seed: int) -> tuple[Accelerator, Any, Any]:
    """Return what Accelerate makes of a model, trained one step under FSDP2, and its optimizer."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    advance(model, optimizer)
    return accelerator, model, optimizer


def save_with_accelerate(out: Path) -> list[str]:
    """Save a state, train on, and load the state; return what differs."""
    accelerator, model, optimizer = prepare_with_accelerate(0)
    accelerator.save_state(str(out / "checkpoint_0"))
    saved = copied({"model": model.state_dict(), "optim": optimizer.state_dict()})
    whole = whole_state(model, optimizer.optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, out / "expected.pt")
    advance(model, optimizer)
    accelerator.load_state(str(out / "checkpoint_0"))
    found = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    return differences(saved, copied(found))


def load_with_accelerate(out: Path) -> list[str]:
    """Load a state on these ranks, and once more when it is corrupted; return what differs."""
    accelerator, model, optimizer = prepare_with_accelerate(1)
    accelerator.load_state(str(out / "checkpoint_0"))
    expected = torch.load(out / "expected.pt", weights_only=False)
    different = differences(expected, whole_state(model, optimizer.optimizer))
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_byte(out / "checkpoint_0" / "optimizer_0" / "__1_0.distcp", -20)
    dist.barrier()
    with pytest.raises(CheckpointException, match="is corrupted"):
        accelerator.load_state(str(out / "checkpoint_0"))
    return different


def save_and_die(out: Path) -> None:
    """Call `async_save`, change the tensors at once, and kill the ranks."""
    model, optimizer = train(2)
    whole = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, out / "expected.pt")
    group = dist.new_group()  # of DCP's thread
    state = {"app": AppState(model, optimizer)}
    dcp.async_save(state, checkpoint_id=out / "step_2" / "trainer", process_group=group)
    for parameter in model.parameters():
        parameter.data.fill_(0)
    kill_all_ranks()


def save_in_every_way(out: Path) -> dict[str, bool]:
    """Save by calls that the switch takes and by others; return which folders have a record."""
    state = {"app": AppState(*train(1)), "n": 1}

    class OwnWriter(dcp.FileSystemWriter):
        pass

    class OwnPlanner(dcp.DefaultSavePlanner):
        pass

    def write(name: str, **more: Any) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(out / name), **more)

    group = dist.new_group([0])
    write("writer")
    write("planner", planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    write("again")
    write("again")
    process = AsyncCheckpointerType.PROCESS
    dcp.async_save(state, checkpoint_id=out / "async", async_checkpointer_type=process).result()  # type: ignore[union-attr]
    write("dcp-planner", planner=OwnPlanner())
    dcp.save(state, storage_writer=OwnWriter(out / "dcp-writer"))
    dcp.save(state, checkpoint_id=out.parent / "dcp-elsewhere")
    thread = threading.Thread(target=write, args=["dcp-thread"])
    thread.start()
    thread.join()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(state, checkpoint_id=out / "dcp-stager", async_stager=stager).result()  # type: ignore[union-attr]
    stager.close()
    if dist.get_rank() == 0:
        dcp.save({"n": 1}, checkpoint_id=out / "dcp-group", process_group=group)
        dcp.save({"n": 1}, checkpoint_id=out / "dcp-alone", no_dist=True)
    dist.barrier()
    folders = [path.parent for path in out.parent.rglob(".metadata")]
    saves = out / "saves"
    return {each.name: (each / RECORD).exists() for each in folders if saves not in each.parents}


def save_where_nothing_can_be(out: Path) -> str:
    """Save to a folder that is a file, then to another; return the error."""
    state = {"app": AppState(*train(1))}
    if dist.get_rank() == 0:
        (out / "file").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointException) as failed:
        dcp.save(state, checkpoint_id=out / "file")
    dcp.save(state, checkpoint_id=out / "folder")
    assert (out / "folder" / RECORD).exists()
    return str(failed.value)


def save_before_the_group(out: Path) -> bool:
    """Save on rank 0 without a process group, then on all ranks in one."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        dcp.save({"n": 1}, checkpoint_id=out / "alone")
    dist.init_process_group("gloo", init_method=f"file://{out}/again", rank=rank, world_size=2)
    dcp.save({"app": AppState(*train(1))}, checkpoint_id=out / "together")
    assert (out / "together" / "__1_0.distcp").exists()
    return all((out / name / RECORD).exists() for name in ("alone", "together"))


# ------------------------------------------------------------ tests


def await_newest(root: Path, step: int) -> None:
    """Wait until the root has the newest step alone; what follows a commit removes the others."""
    await_that(lambda: steps_on_disk(root) == [step], "the root keeps the newest step")


def save_and_load(out: Path, spool: Path, kind: str) -> None:
    names, steps = globals(), (2,) if kind == "prime_rl" else ()
    expected = on_ranks(out, switched, names[f"save_like_{kind}"], out, spool, 2)
    checkpoint = max(out.rglob(RECORD)).parent  # of step 2
    await_newest(out / "saves", 2)
    load = names[f"load_like_{kind}"]
    require_same(expected, on_ranks(out, switched, load, out, spool, *steps))
    require_same(expected, on_ranks(out, load, out, *steps))  # without the switch
    if kind == "prime_rl":
        flip_a_byte(checkpoint / "__0_0.distcp", -20)
    else:
        with (checkpoint / ".metadata").open("ab") as index:
            index.write(b"\0")  # which a pickle may have at its end
    with pytest.raises(AssertionError, match="is corrupted"):
        on_ranks(out, switched, load, out, spool, *steps)


def use_accelerate(out: Path, spool: Path) -> None:
    found = on_ranks(out, switched, save_with_accelerate, out, spool)
    assert found == [[], []], found
    found = on_ranks(out, switched, load_with_accelerate, out, spool, world_size=3)
    assert found == [[], [], []], found
    names = {path.parent.name for path in (out / "checkpoint_0").glob(f"*/{RECORD}")}
    assert names == {"pytorch_model_fsdp_0", "optimizer_0"}, names


def die(out: Path, spool: Path) -> None:
    killed_ranks(out, switched, save_and_die, out, spool)
    folder = out / "step_2" / "trainer"
    await_that((folder / ".metadata").exists, "it is linked without the ranks")
    (folder / "dataloader").mkdir()
    for rank in range(2):
        torch.save({"at": 2}, folder / "dataloader" / f"rank_{rank}.pt")
    found = on_ranks(out, load_like_prime_rl, out, 2)
    require_same([torch.load(out / "expected.pt", weights_only=False)] * 2, found)


def take_what_can_be_taken(out: Path, spool: Path) -> None:
    ours, _ = on_ranks(out, switched, save_in_every_way, out, spool)
    assert ours == {name: not name.startswith("dcp-") for name in ours}, ours
    assert len(ours) == 11, ours
    await_newest(out / "saves", 5)


def say_what_is_wrong(out: Path, spool: Path) -> None:
    for message in on_ranks(out, switched, save_where_nothing_can_be, out, spool):
        assert f"{out / 'file'} is no checkpoint, though its files are committed" in message


def make_a_group_later(out: Path, spool: Path) -> None:
    assert on_ranks(out, switched, save_before_the_group, out, spool) == [True, True]
    await_newest(out / "saves", 2)
