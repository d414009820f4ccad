"""What W ranks saved is loaded by W' ranks: the same state, and the same losses from there on.

The reference is a run of W' ranks whose state was set by PyTorch from whole tensors, which the W
ranks had gathered: so no code of ours takes part in it.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.models import Trained, gathered
from tests.integration.fsdp.ranks import Turns, on_ranks
from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.states import differences
from trinity_sync import CommitError, ConfigError
from trinity_sync.formats.dcp import to_dcp
from trinity_sync.formats.shard_reader import SavedState, outline_files
from trinity_sync.integrations.verl.fsdp.reshard import derive_rng, load_resharded
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.storage.steps_in_use import list_leases

STEP = 3

pytestmark = pytest.mark.slow  # four ranks train and save in turn

SAVED = {  # version of FSDP, ranks, replicas; "original" has FSDP1's use_orig_params
    "original-1": (1, 1, 1),
    "original-2": (1, 2, 1),
    "original-3": (1, 3, 1),
    "original-4": (1, 4, 1),
    "fsdp1-1": (1, 1, 1),
    "fsdp2-1": (2, 1, 1),
    "fsdp1-2": (1, 2, 1),
    "fsdp2-2": (2, 2, 1),
    "fsdp2-3": (2, 3, 1),
    "fsdp2-4": (2, 4, 1),
    "fsdp2-2x2": (2, 4, 2),
}


Loaded = dict[tuple[str, str], list[dict[str, Any]]]
"""What each rank found, by what was saved and what loaded it."""


def save(names: list[str], tiny: Path, jobs: Path) -> None:
    """Train, save through the manager, and put the whole state next to it."""
    for name in names:
        version, _, replicas = SAVED[name]
        trained = Trained(tiny, version, replicas=replicas, original="original" in name)
        for _ in range(STEP):
            trained.step()
        coordinator = coordinator_of(jobs / name)
        manager = trained.manager(coordinator)
        manager.save_checkpoint(str(step_folder(coordinator.root, STEP) / "actor"), STEP)
        manager.wait_on_save_thread()
        whole = whole_state(trained)
        if dist.get_rank() == 0:
            torch.save(whole, jobs / f"{name}.pt")
        coordinator.close()
        dist.barrier()


def _save_four_numbers(jobs: Path) -> None:
    """Too few for three ranks: the last one has none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    file = shard_file("model", dist.get_world_size(), dist.get_rank())
    torch.save({"numbers": numbers}, jobs / file)


def whole_state(trained: Trained) -> dict[str, Any]:
    """Model and optimizer as whole tensors, by name, gathered by PyTorch; on rank 0."""
    options = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(trained.model, trained.optimizer, options=options)
    whole = {"model": model, "optim": optim, "lr_scheduler": trained.schedule.state_dict()}
    return dict(gathered(whole))


def load(name: str, by: str, tiny: Path, jobs: Path) -> dict[str, Any]:
    """Load and go on, once through the manager and once through PyTorch."""
    read: list[int] = []
    log = logging.getLogger("trinity_sync.integrations.verl.fsdp.reshard")
    log.setLevel(logging.INFO)

    def note(record: logging.LogRecord) -> bool:
        if "bytes of" in record.getMessage():
            read.append(int(str(record.args[1]).replace(",", "")))  # type: ignore[index]
        return True

    log.addFilter(note)
    how: dict[str, Any] = {"version": SAVED[by][0], "original": "original" in by}
    ours = Trained(tiny, **how, seed=1000)
    ours.manager().load_checkpoint(str(step_folder(jobs / name, STEP) / "actor"))
    random_state = torch.get_rng_state().numpy().tobytes()
    kept = sum(
        value.numel() * value.element_size()
        for value in _tensors({**ours.state(), "extra_state": None})
    )
    whole, gathered = torch.load(jobs / f"{name}.pt"), whole_state(ours)
    loaded = {"whole": differences(whole, gathered) if dist.get_rank() == 0 else []}
    theirs = Trained(tiny, **how, seed=2000)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        theirs.model,
        theirs.optimizer,
        model_state_dict=whole["model"],
        optim_state_dict=whole["optim"],
        options=options,
    )
    theirs.schedule.load_state_dict(whole["lr_scheduler"])
    loaded["shards"] = [d for d in differences(theirs.state(), ours.state()) if "rng" not in d]
    losses = []
    for trained in (ours, theirs):
        torch.manual_seed(dist.get_rank())
        losses.append([trained.step() for _ in range(3)])
    log.removeFilter(note)
    return {
        **loaded,
        "losses": losses,
        "after": [d for d in differences(theirs.state(), ours.state()) if "rng" not in d],
        "kept": kept,
        "read": sum(read),
        "rng": random_state,
        "leases": list_leases(jobs / name),
    }


def read_by_verl(name: str, root: Path, tiny: Path, jobs: Path) -> list[str]:
    """Where model and optimizer differ from what was saved, if veRL's own loader reads a root."""
    trained = Trained(tiny, SAVED[name][0], seed=1000, original="original" in name)
    trained.step()
    manager = trained.verls_manager(load_contents=["model", "optimizer"])
    manager.load_checkpoint(str(step_folder(root, STEP) / "actor"))
    gathered = whole_state(trained)
    if dist.get_rank():
        return []
    whole = torch.load(jobs / f"{name}.pt")
    return [d for d in differences(whole, gathered) if "lr_scheduler" not in d]


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, list):
        return [tensor for value in state for tensor in _tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


@pytest.fixture(scope="module")
def loaded(tiny: Path, jobs: Path) -> Loaded:
    """What each rank found, by what was saved and what loaded it."""
    ranks = on_ranks(_elastic, tiny, jobs, scratch=jobs, world_size=4, timeout_s=250)
    cases = ranks[0].keys()
    return {case: [rank[case] for rank in ranks if case in rank] for case in cases}


def _elastic(tiny: Path, jobs: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The same processes as four ranks, as one, two, three and one again; some sit out."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    turns = Turns(jobs)

    def as_ranks(world_size: int, saves: list[str], loads: dict[str, str]) -> None:
        if turns.become(world_size):
            save(saves, tiny, jobs)
            _save_four_numbers(jobs)
            for saved, by in loads.items():
                found[saved, by] = load(saved, by, tiny, jobs)
            for name in saves:
                if "original" in name:
                    found[name, "verl"] = {"whole": read_by_verl(name, jobs / name, tiny, jobs)}
        turns.become(4)

    def loads(world_size: int) -> dict[str, str]:
        saved = {s: by for s, by in CASES if SAVED[by][1] == world_size}
        return {s: by for s, by in saved.items() if (jobs / f"{s}.pt").exists()}

    save(["fsdp2-4", "fsdp2-2x2", "original-4"], tiny, jobs)
    as_ranks(1, ["fsdp1-1", "fsdp2-1", "original-1"], {})
    as_ranks(2, ["fsdp1-2", "fsdp2-2", "original-2"], loads(2))
    as_ranks(3, ["fsdp2-3", "original-3"], loads(3))
    as_ranks(1, [], loads(1))
    return found


CASES = [
    ("original-1", "original-2"),
    ("original-4", "original-3"),
    ("original-3", "original-1"),
    ("fsdp1-1", "fsdp1-2"),
    ("fsdp1-2", "fsdp1-1"),
    ("fsdp2-1", "fsdp2-2"),
    ("fsdp2-2", "fsdp2-1"),
    ("fsdp2-4", "fsdp2-3"),
    ("fsdp2-2x2", "fsdp2-3"),
    ("fsdp2-3", "fsdp2-1"),
]


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_model_and_optimizer_equal_the_saved_state_bit_for_bit(
    loaded: Loaded, saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        assert rank["whole"] == []
        assert rank["shards"] == []


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_training_goes_on_as_in_a_run_that_had_the_state_all_along(
    loaded: Loaded, saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        ours, theirs = rank["losses"]
        assert ours == theirs
        assert rank["after"] == []


@pytest.mark.parametrize(("saved", "by"), CASES)
def test_a_rank_reads_only_what_it_keeps_and_gives_the_step_up_afterwards(
    loaded: Loaded, saved: str, by: str
) -> None:
    for rank in loaded[saved, by]:
        assert 0 < rank["read"] <= rank["kept"]
        assert rank["leases"] == []


@pytest.mark.parametrize(("saved", "by"), [("fsdp2-1", "fsdp2-2"), ("fsdp2-4", "fsdp2-3")])
def test_a_rank_has_its_own_random_state_or_one_of_its_own_making(
    loaded: Loaded, jobs: Path, saved: str, by: str
) -> None:
    _, saved_by, _ = SAVED[saved]
    folder = step_folder(jobs / saved, STEP) / "actor"
    files = [folder / shard_file("extra_state", saved_by, rank) for rank in range(saved_by)]
    rngs = [torch.load(file, weights_only=False)["rng"] for file in files]
    for rank, found in enumerate(loaded[saved, by]):
        expected = rngs[rank] if rank < saved_by else derive_rng(rngs[0], rank)
        assert found["rng"] == expected["cpu"].numpy().tobytes()
    derived = [derive_rng(rngs[0], rank)["cpu"].numpy().tobytes() for rank in (7, 7, 8)]
    assert derived[0] == derived[1] != derived[2]


def test_ranks_without_a_part_of_a_tensor_do_no_harm(loaded: Loaded, jobs: Path) -> None:
    files = [jobs / shard_file("model", 3, rank) for rank in range(3)]
    saved = SavedState(files, [*outline_files(files, range(3)).values()])
    assert [list(chunk.sizes) for chunk in saved.tensors["numbers"].chunks] == [[2], [2]]
    assert saved.read_tensor("numbers", torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_flat_shards_of_original_parameters_are_read_by_verls_own_loader(
    loaded: Loaded, ranks: int
) -> None:
    assert [rank["whole"] for rank in loaded[f"original-{ranks}", "verl"]] == [[]] * ranks


def test_shards_are_loaded_by_plain_dcp_into_a_plain_module(
    loaded: Loaded, tiny: Path, jobs: Path, tmp_path: Path
) -> None:
    to_dcp(jobs / "fsdp2-2", STEP, tmp_path / "dcp")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(4)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.load(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optim"])
    whole = torch.load(jobs / "fsdp2-2.pt")
    assert differences(dict(whole["model"]), dict(model.state_dict())) == []
    found = optimizer.state_dict()
    for number, (name, _) in enumerate(model.named_parameters()):
        assert differences(whole["optim"]["state"][name], found["state"][number]) == []
    assert found["param_groups"][0]["lr"] == whole["optim"]["param_groups"][0]["lr"]


def test_the_optimizer_of_fsdp1_is_not_converted_and_its_model_is(
    loaded: Loaded, jobs: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="flat state of FSDP1"):
        to_dcp(jobs / "fsdp1-2", STEP, tmp_path / "out")
    to_dcp(jobs / "fsdp1-2", STEP, tmp_path / "out", components=["model"])
    whole = torch.load(jobs / "fsdp1-2.pt")["model"]
    model = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load({"model": model}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert differences(dict(whole), model) == []


def test_a_corrupted_file_is_refused_before_anything_is_loaded(
    loaded: Loaded, one_rank: None, tiny: Path, jobs: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(jobs / "fsdp2-2", tmp_path / "job")
    folder = step_folder(root, STEP) / "actor"
    with (folder / shard_file("optim", 2, 1)).open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"torn")
    trained = Trained(tiny, 2)
    before = trained.state()
    with pytest.raises(CommitError, match=r"optim_world_size_2_rank_1.pt is corrupted"):
        trained.manager().load_checkpoint(str(folder))
    assert differences(before, trained.state()) == []


def test_the_optimizer_of_another_strategy_is_refused_with_a_way_out(
    loaded: Loaded, one_rank: None, tiny: Path, jobs: Path
) -> None:
    folder = step_folder(jobs / "fsdp1-2", STEP) / "actor"
    for version, original in ((2, False), (1, True)):
        trained = Trained(tiny, version, original=original)
        with pytest.raises(ConfigError, match=r"take optimizer out of checkpoint.load_contents"):
            trained.manager().load_checkpoint(str(folder))
    folder = step_folder(jobs / "original-2", STEP) / "actor"
    with pytest.raises(CommitError, match=r"optim_world.*state\..* leave this component out"):
        Trained(tiny, 2).manager().load_checkpoint(str(folder))
    folder = step_folder(jobs / "fsdp2-2", STEP) / "actor"
    with pytest.raises(ConfigError, match=r"take optimizer out of checkpoint.load_contents"):
        Trained(tiny, 1, original=True).manager().load_checkpoint(str(folder))


def test_a_list_of_an_optimizer_is_put_together_like_its_other_tensors(
    one_rank: None, tmp_path: Path
) -> None:
    whole, meshes = torch.arange(6.0).reshape(2, 3), [make_mesh("cpu", n, 2) for n in range(2)]
    for rank, mesh in enumerate(meshes):
        shard = make_dtensor(whole[rank : rank + 1].clone(), mesh, whole.shape)
        state = {"GG": [shard, torch.ones(4)], "steps": [1, 2]}
        saved = {"state": {0: state}, "param_groups": [{"params": [0]}]}
        torch.save(saved, tmp_path / shard_file("optim", 2, rank))
    model: Any = torch.nn.Linear(3, 2, bias=False)
    fully_shard(model)
    ((_, found),) = load_resharded(
        tmp_path,
        2,
        ["optim"],
        committed=False,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
    )
    lists = gathered(found["state"][0]["GG"][0]), found["state"][0]["GG"][1]
    assert differences({"GG": (whole, torch.ones(4))}, {"GG": lists}) == []
    assert found["state"][0]["steps"] == [1, 2]
