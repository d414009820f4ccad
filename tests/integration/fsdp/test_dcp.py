"""DCP saves through slots and commits as any save; what is committed is read on any mesh.

The reference is the whole state, which the ranks that saved gathered with PyTorch alone.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.fsdp.commits import Fails, coordinator_of
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import differences
from trinity_sync.errors import SaveFailedError
from trinity_sync.integrations.dcp import DcpSaver, StepReader
from trinity_sync.layout import step_folder

STEPS = (1, 2, 3)


class Trained:
    """A model under FSDP2 over tensor parallelism, or without one of them, and its optimizer.

    Of the kind ``frozen`` the first layer is not trained, and left out by PyTorch's option.
    """

    def __init__(
        self,
        shape: tuple[int, int] | None,
        *,
        seed: int = 0,
        replicas: bool = False,
        kind: str = "",
    ):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 6)
        )
        if shape and replicas:
            fully_shard(self.model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))
        elif shape:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, mesh["tp"], plan)
            fully_shard(self.model, mesh=mesh["dp"])
        self.frozen = kind == "frozen"
        self.model[0].requires_grad_(not self.frozen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        self.model(torch.ones(2, 6)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, step: int, *, whole: bool = False) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=whole, ignore_frozen_params=self.frozen)
        model, optim = get_state_dict(self.model, self.optimizer, options=options)
        text = "x" * (100 if step == 1 else 1000)  # the second save is planned again
        return {"model": model, "optim": optim, "step": step, "text": text}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=not self.frozen),
        )


def save(root: Path, shape: tuple[int, int] | None, replicas: bool) -> None:
    """Train and save; after the copy of each step its tensors change at once.

    The saves with replicas overlap, without DCP's exchanges between ranks.
    """
    trained = Trained(shape, replicas=replicas, kind=root.parent.name)
    with coordinator_of(root) as saves:
        saver, futures = DcpSaver(saves), []
        for step in STEPS:
            trained.step()
            whole = trained.state(step, whole=True)
            if dist.get_rank() == 0:
                torch.save(whole, root.parent / f"{step}.pt")
            writer = saver.writer(step)
            saved = dcp.async_save(
                trained.state(step), storage_writer=writer, async_stager=writer, no_dist=replicas
            )
            with torch.no_grad():
                for parameter in trained.model.parameters():
                    parameter.add_(1)
            assert isinstance(saved, Future)
            futures.append(saved)
            if not replicas:
                assert saved.result(60).storage_data
                assert saves.latest_step() == step
            with torch.no_grad():
                for parameter in trained.model.parameters():
                    parameter.sub_(1)
        for saved in futures:
            saved.result(60)


def load(root: Path, shape: tuple[int, int] | None, replicas: bool) -> list[str]:
    """Load the last step into a state of another content; return what differs from the reference.

    Plain DCP reads all of them below.
    """
    trained = Trained(shape, seed=1, replicas=replicas, kind=root.parent.name)
    trained.step()
    state = trained.state(0)
    dcp.load(state, storage_reader=StepReader(root, STEPS[-1]))
    trained.load(state)
    whole = {**trained.state(0, whole=True), "step": state["step"], "text": state["text"]}
    return differences(torch.load(root.parent / f"{STEPS[-1]}.pt"), whole)


def save_and_load(folder: Path) -> list[str]:
    for name, (shape, replicas) in SAVED.items():
        save(folder / name / "ckpts", shape, replicas)
    return load_all(folder)


def load_all(folder: Path) -> list[str]:
    """Load what four ranks saved on all meshes of these ranks; return what differs."""
    return [
        f"{name} on {shape}: {found}"
        for name in SAVED
        for shape, replicas in MESHES[dist.get_world_size()]
        for found in load(folder / name / "ckpts", shape, replicas)
    ]


SAVED: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "fsdp-over-tp": ((2, 2), False),
    "hsdp": ((2, 2), True),
    "ddp": (None, False),
    "frozen": ((2, 2), False),
}
MESHES: dict[int, list[tuple[tuple[int, int] | None, bool]]] = {
    4: [((2, 2), False), ((4, 1), False), ((2, 2), True)],
    2: [((2, 1), False), ((1, 2), False)],
    1: [(None, False)],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps that four ranks saved, after these ranks have loaded them."""
    folder = tmp_path_factory.mktemp("saved")
    for name in SAVED:
        (folder / name).mkdir()
    assert on_ranks(save_and_load, folder, scratch=folder, world_size=4) == [[]] * 4
    return folder


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_four_ranks_saved_is_loaded_on_other_meshes(saved: Path, ranks: int) -> None:
    assert on_ranks(load_all, saved, scratch=saved, world_size=ranks) == [[]] * ranks


@pytest.mark.parametrize("name", SAVED)
def test_plain_dcp_reads_a_committed_folder(saved: Path, name: str) -> None:
    for step in STEPS:
        folder = step_folder(saved / name / "ckpts", step) / "actor"
        trained = Trained(None, seed=1, kind=name)
        trained.step()
        state = trained.state(0)
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        assert differences(torch.load(saved / name / f"{step}.pt"), state) == []


@pytest.mark.parametrize("name", SAVED)
def test_a_replica_is_written_once(saved: Path, name: str) -> None:
    folder = step_folder(saved / name / "ckpts", 3) / "actor"
    index = dcp.FileSystemReader(folder).read_metadata()
    chunks = [
        chunk.sizes.numel() * meta.properties.dtype.itemsize
        for meta in index.state_dict_metadata.values()
        if hasattr(meta, "chunks")
        for chunk in meta.chunks
    ]
    whole = torch.load(saved / name / "3.pt")
    tensors = [*whole["model"].values()]
    tensors += [each for state in whole["optim"]["state"].values() for each in state.values()]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert sum(chunks) == nbytes
    files = sorted(folder.glob("*.distcp"))
    assert [file.name for file in files] == [f"__{rank}_0.distcp" for rank in range(4)]
    stored = index.storage_data.values()
    headers = sum(place.length for place in stored) - nbytes
    assert headers < 2000 * len(stored)
    assert sum(file.stat().st_size for file in files) < nbytes + headers + 64 * len(stored)


def fail(folder: Path) -> list[str]:
    """Save what cannot be planned or committed on rank 1; return the errors here."""
    saves = coordinator_of(folder / "ckpts", Fails(3))
    saver, last = DcpSaver(saves), dist.get_rank() == 1
    errors = []
    for step in (1, 2, 3, 4):
        bad = {"bad": (lambda: None)} if last and step == 2 else {}
        state = {"w": torch.full((4,), float(step)), **bad}
        writer = saver.writer(step)
        saved = dcp.async_save(state, storage_writer=writer, async_stager=writer)
        try:
            saved.result(60)
            errors.append("")
        except CheckpointException as error:
            errors.append(str(error))
    try:
        saves.wait_all(250)
    except SaveFailedError as error:
        errors.append(str(error))
    saves.close()
    return errors


def test_what_fails_on_one_rank_fails_on_all_and_later_saves_go_on(tmp_path: Path) -> None:
    for errors in on_ranks(fail, tmp_path, scratch=tmp_path):
        planned, committed, all_of_them = errors[1], errors[2], errors[4]
        assert (errors[0], errors[3]) == ("", "")
        assert "step 2, role actor: nothing was submitted, because rank 1" in planned
        assert "bad cannot be pickled" in planned
        assert "the disk is full" in committed
        assert "step 2" in all_of_them
        assert "step 3" in all_of_them
    assert not step_folder(tmp_path / "ckpts", 2).exists()
