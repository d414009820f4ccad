"""DCP saves through slots and loads committed steps; of several ranks see `fsdp/test_dcp`."""

import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold, Fails
from tests.support.disk import flip_a_byte, no_file_above
from tests.support.states import differences
from tests.unit.conftest import Open, Runs
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError, ConfigError, ImageError, SaveFailedError
from trinity_sync.integrations.dcp import DcpSaver, StepReader
from trinity_sync.integrations.dcp.planned_file import describe_structure
from trinity_sync.integrations.dcp.reader import parse_index
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.steps_in_use import list_leases
from trinity_sync.storage.verify import check_files, choose_files, judge_steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counting(dcp.DefaultSavePlanner):
    """Counts how often all ranks planned together."""

    plans = 0

    def create_global_plan(self, all_plans: Any) -> Any:
        type(self).plans += 1
        return super().create_global_plan(all_plans)


@pytest.fixture
def saves(coordinator_of: Open) -> CheckpointCoordinator:
    return coordinator_of(trigger=CommitsHere())


def save(saver: DcpSaver, step: int, state: dict[str, Any], **more: Any) -> Any:
    writer = saver.writer(step)
    return dcp.async_save(state, storage_writer=writer, async_stager=writer, **more)


def load(root: Path, step: int, state: dict[str, Any]) -> dict[str, Any]:
    """Load into zeros of the same shapes."""
    found = zeros(state)
    dcp.load(found, storage_reader=StepReader(root, step), no_dist=True)
    return found


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else 0


def odd_state() -> dict[str, Any]:
    whole = torch.randn(1000)
    return {
        "model": {
            "plain": torch.randn(3, 4),
            "parameter": torch.nn.Parameter(torch.randn(5)),
            "part": whole[10:30],
            "columns": torch.randn(6, 10)[:, 2:5],
            "transposed": torch.randn(4, 5).t(),
            "expanded": torch.randn(1).expand(4, 3),
            "overlapping": torch.randn(9).as_strided((2, 2), (1, 1), 3),
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
            "half": torch.randn(7).bfloat16(),
            "eighth": torch.randn(8).to(torch.float8_e4m3fn).view(torch.uint8),
            "flags": torch.tensor([True, False]),
        },
        "step": 7,
        "lr": 0.1,
        "rng": torch.get_rng_state(),
        "name": "x" * 3000,
    }


def test_any_tensor_and_value_is_loaded_bit_equal(
    saves: CheckpointCoordinator, tmp_path: Path
) -> None:
    state = odd_state()
    save(DcpSaver(saves), 7, state).result(30)
    assert not differences(load(saves.root, 7, state), state)
    plain = zeros(state)
    reader = dcp.FileSystemReader(step_folder(saves.root, 7) / "actor")
    dcp.load(plain, storage_reader=reader, no_dist=True)
    assert not differences(plain, state)
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    ours = (step_folder(saves.root, 7) / "actor/__0_0.distcp").stat().st_size
    theirs = (tmp_path / "plain/__0_0.distcp").stat().st_size
    assert abs(ours - theirs) < 64 * 20


def test_a_plan_is_made_again_only_for_another_structure(saves: CheckpointCoordinator) -> None:
    saver = DcpSaver(saves, planner=Counting)
    state = odd_state()
    Counting.plans = 0
    expected = {}
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"step": 8, "lr": 0.2},
        {"name": "y" * 5000},
        {"more": torch.ones(3)},
        {},
    )
    counts = []
    for step, change in enumerate(changes):
        state |= {**change, "rng": torch.rand(100).byte(), "model": odd_state()["model"]}
        expected[step] = dict(state)
        save(saver, step, state, planner=Counting(), no_dist=True).result(30)
        counts.append(Counting.plans)
    # DCP's thread plans the empty state each time
    assert [count - step - 1 for step, count in enumerate(counts)] == [1, 1, 2, 3, 3]
    for step, each in expected.items():
        assert not differences(load(saves.root, step, each), each), step


def test_what_has_a_state_dict_is_planned_as_that_and_once(saves: CheckpointCoordinator) -> None:
    saver, model = DcpSaver(saves, planner=Counting), torch.nn.Linear(2, 3)
    Counting.plans = 0
    for step in (1, 2):
        saver.writer(step).stage({"model": model})  # as TorchTitan's manager, without DCP
    assert Counting.plans == 1
    saves.wait_all(250)
    state = {"model": model.state_dict()}
    assert not differences(load(saves.root, 2, state), state)


def describe(state: dict[str, Any], planner: Any = None) -> list[Any] | None:
    planner = planner or dcp.DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    return describe_structure(planner)


def test_a_structure_is_that_of_names_and_tensors_without_their_values() -> None:
    assert describe(odd_state()) is not None
    assert describe(odd_state()) == describe(odd_state() | {"step": 8, "name": "y", "lr": 1.0})

    class Own(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            return super().create_local_plan()

    class OwnTensor(torch.Tensor):
        pass

    assert describe({"w": torch.zeros(3)}, Own()) is None
    assert describe({"w": torch.zeros(3).as_subclass(OwnTensor)}) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.zeros(3, 4).double()},
        {"w": torch.zeros(4, 3)},
        {"w": torch.zeros(3, 4, requires_grad=True)},
        {"w": torch.zeros(3, 4).to_sparse()},
        {"w": [1, 2]},
        {"v": torch.zeros(3, 4)},
        {"w": torch.zeros(3, 4), "v": 1},
        {"w.v": torch.zeros(3, 4)},
    ],
)
def test_another_structure_is_planned_again(changed: dict[str, Any]) -> None:
    before = {"w": torch.zeros(3, 4)} if "w.v" not in changed else {"w": {"v": torch.zeros(3, 4)}}
    assert describe(before) != describe(changed)


def test_planners_that_cache_plans_save_what_each_role_has_gained(coordinator_of: Open) -> None:
    """DCP has one cache for all planners of a class, so one role's plan hides that of another."""
    roles = ("actor", "critic")
    saves = coordinator_of(trigger=CommitsHere(), roles=roles)
    planner = partial(dcp.DefaultSavePlanner, enable_plan_caching=True)
    savers = [DcpSaver(saves, role=role, planner=planner) for role in roles]
    for step, names in ((1, ["w"]), (2, ["w", "moment"]), (3, ["w", "moment"])):
        states = {role: {name: torch.rand(3) for name in names} for role in roles}
        pairs = zip(savers, states.values(), strict=True)
        for each in [save(saver, step, state) for saver, state in pairs]:
            each.result(30)
        for role, state in states.items():
            found = zeros(state)
            reader = StepReader(saves.root, step, role=role)
            dcp.load(found, storage_reader=reader, no_dist=True)
            assert not differences(found, state), (step, role)


def test_saves_that_overlap_all_commit(coordinator_of: Open) -> None:
    slow = CommitsWhenTold()
    saves = coordinator_of(trigger=slow)
    saver = DcpSaver(saves)
    weights = torch.zeros(1000)
    futures = []
    for step in (1, 2):
        weights.fill_(step)
        futures.append(save(saver, step, {"w": weights}, no_dist=True))
    weights.fill_(9)
    assert not any(each.done() for each in futures)
    slow.go()
    saves.wait_all(250)
    assert [each.result(30) is not None for each in futures] == [True, True]
    for step in (1, 2):
        assert load(saves.root, step, {"w": weights})["w"].eq(step).all()


def test_a_future_ends_when_the_coordinator_is_closed(coordinator_of: Open) -> None:
    saves = coordinator_of(trigger=CommitsWhenTold())  # it is not told
    future = save(DcpSaver(saves), 1, {"w": torch.ones(3)})
    saves.close(timeout=0)
    with pytest.raises(CheckpointException, match="not committed yet when the coordinator was"):
        future.result(30)


def test_a_failed_flow_is_raised_by_the_future_and_by_wait_all(coordinator_of: Open) -> None:
    saves = coordinator_of(trigger=Fails())
    future = save(DcpSaver(saves), 3, {"w": torch.ones(3)})
    with pytest.raises(CheckpointException, match=r"save actor step 3 .*the disk is full"):
        future.result(30)
    with pytest.raises(SaveFailedError, match=r"save actor step 3 .*the disk is full"):
        saves.wait_all(250)
    saves.wait_all(250)  # once


def test_a_later_save_that_cannot_be_staged_is_raised_likewise_and_training_goes_on(
    coordinator_of: Open,
) -> None:
    trigger = CommitsHere()
    saves = coordinator_of(trigger=trigger)
    saver = DcpSaver(saves)
    save(saver, 1, {"w": torch.ones(3)}).result(30)
    trigger.finish()
    with no_file_above(4 << 20):
        too_large = save(saver, 2, {"w": torch.ones(4 << 20)})
    unpicklable = save(saver, 3, {"w": torch.ones(3), "f": lambda: None})
    with pytest.raises(CheckpointException, match=r"step 2, .* cannot be written"):
        too_large.result(30)
    with pytest.raises(CheckpointException, match=r"step 3, .*rank 0 .*f cannot be pickled"):
        unpicklable.result(30)
    with pytest.raises(SaveFailedError, match=r"(?s)step 2, .*step 3, "):
        saves.wait_all(250)
    save(saver, 4, {"w": torch.full((3,), 4.0)}).result(30)
    assert load(saves.root, 4, {"w": torch.ones(3)})["w"].tolist() == [4.0] * 3
    assert not step_folder(saves.root, 3).exists()


def test_a_first_save_that_cannot_be_planned_raises_at_once(saves: CheckpointCoordinator) -> None:
    saver = DcpSaver(saves)
    with pytest.raises(ImageError, match=r"step 1, role actor: .*f cannot be pickled"):
        save(saver, 1, {"f": lambda: None})
    with pytest.raises(ImageError, match=r"step 1, .*: w cannot be pickled, .* has no data"):
        save(saver, 1, {"w": torch.ones(3, device="meta")})
    with pytest.raises(ImageError, match=r"w cannot be pickled, .*DCP does not load .*sparse_coo"):
        save(saver, 1, {"w": torch.eye(3).to_sparse()})  # as DCP refuses it
    save(saver, 2, {"w": torch.ones(3)}).result(30)


@pytest.mark.parametrize(("name", "at"), [("__0_0.distcp", -1000), (".metadata", -20)])
def test_a_corrupted_file_is_refused_before_anything_is_loaded(
    saves: CheckpointCoordinator, name: str, at: int
) -> None:
    state = odd_state()
    save(DcpSaver(saves), 7, state).result(30)
    flip_a_byte(step_folder(saves.root, 7) / "actor" / name, at)
    found = zeros(state)
    with pytest.raises(CheckpointException, match=rf"{re.escape(name)} is corrupted"):
        dcp.load(found, storage_reader=StepReader(saves.root, 7), no_dist=True)
    assert not differences(found, zeros(state))
    assert list_leases(saves.root) == []


def test_an_index_of_python_3_13_is_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    content = pickle.dumps(index, protocol=2)  # which names classes in lines
    assert b"cpathlib" in content
    by_3_13 = re.sub(rb"cpathlib(\._local)?\nPosixPath", b"cpathlib._local\nPosixPath", content)
    read = parse_index(by_3_13, tmp_path / ".metadata")
    assert read.storage_meta.checkpoint_id == tmp_path


def test_an_index_that_would_run_code_does_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not trusted"):
        parse_index(pickle.dumps(Runs(tmp_path / "ran")), tmp_path / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_steps_without_a_commit_or_without_dcp_are_refused(saves: CheckpointCoordinator) -> None:
    with pytest.raises(CheckpointException, match=r"step 3 .*not committed"):
        load(saves.root, 3, {"w": torch.ones(3)})
    saves.save(4, {"model": {"w": torch.ones(3)}})
    saves.wait_all(250)
    with pytest.raises(CheckpointException, match=r"step 4 .*has no DCP state of role actor"):
        load(saves.root, 4, {"w": torch.ones(3)})
    save(DcpSaver(saves), 5, {"w": torch.ones(3)}).result(30)
    with pytest.raises(CommitError, match=r"load it by dcp.load with a StepReader"):
        load_states(saves.root, 5, "actor")


def test_values_of_another_user_are_not_unpickled(saves: CheckpointCoordinator) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    state = {"w": torch.ones(3), "text": "mine"}
    save(DcpSaver(saves), 7, state).result(30)
    os.chown(step_folder(saves.root, 7) / "actor/__0_0.distcp", 12345, 12345)
    assert load(saves.root, 7, {"w": torch.ones(3)})["w"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointException, match="may have been written by another user"):
        load(saves.root, 7, state)


def test_a_step_is_leased_until_it_is_read_and_a_reader_loads_after_a_load_that_failed(
    saves: CheckpointCoordinator,
) -> None:
    save(DcpSaver(saves), 7, {"w": torch.ones(3)}).result(30)
    reader = StepReader(saves.root, 7)
    place = reader.read_metadata().storage_meta
    assert place.checkpoint_id == step_folder(saves.root, 7) / "actor"
    assert [lease.step for lease in list_leases(saves.root)] == [7]
    dcp.load({"w": torch.ones(3)}, storage_reader=reader, no_dist=True)
    assert list_leases(saves.root) == []
    reader, found = StepReader(saves.root, 8), {"w": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"step 8 .*not committed"):
        dcp.load(found, storage_reader=reader, no_dist=True)
    save(DcpSaver(saves), 8, {"w": torch.ones(3)}).result(30)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint"):
        dcp.load({"other": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["w"].tolist() == [1.0] * 3
    assert list_leases(saves.root) == []


def test_a_step_of_dcp_is_verified_with_its_attachments(saves: CheckpointCoordinator) -> None:
    saves.attach("position", b"17", step=7)
    save(DcpSaver(saves), 7, {"w": torch.ones(3)}).result(30)
    assert saves.attachment(7, "position") == b"17"
    paths = sorted(record.path for record in require_committed(saves.root, 7).files)
    assert paths == ["actor/.metadata", "actor/__0_0.distcp", "attachments/position"]
    (verified,) = judge_steps(check_files(choose_files(saves.root, step=7)))
    assert (verified.state, verified.files) == ("valid", 3)


STATE = {"w": torch.ones(3)}
USES: dict[str, Callable[[Any], Any]] = {
    "make a writer for each save": lambda writer: [
        dcp.async_save(STATE, storage_writer=writer) for _ in range(2)
    ],
    "a checkpoint_id was passed": lambda writer: dcp.async_save(
        STATE, storage_writer=writer, checkpoint_id="x"
    ).result(30),
    "dcp.save has no stager": lambda writer: dcp.save(STATE, storage_writer=writer, no_dist=True),
    "also as its async_stager": lambda writer: dcp.async_save(
        STATE,
        storage_writer=writer,
        async_stager=DefaultStager(StagingOptions(False, False, False, False)),
    ).result(30),
    "pass that to DcpSaver": lambda writer: dcp.async_save(
        STATE, storage_writer=writer, planner=Counting()
    ).result(30),
    "cannot be sent to another process": pickle.dumps,
}


@pytest.mark.parametrize("message", USES)
def test_what_a_user_can_get_wrong_is_named(saves: CheckpointCoordinator, message: str) -> None:
    with pytest.raises((ConfigError, CheckpointException), match=message):
        USES[message](DcpSaver(saves).writer(1))


def test_a_coordinator_of_other_ranks_is_refused(coordinator_of: Open) -> None:
    with pytest.raises(ConfigError, match="rank 0 of 2, and this is rank 0 of 1"):
        DcpSaver(coordinator_of(world_size=2))


class Meanwhile(dcp.DefaultLoadPlanner):
    """Does something between the comparison of the files and the first read."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work

    def finish_plan(self, central_plan: Any) -> Any:
        self.work()
        return super().finish_plan(central_plan)


def test_a_step_that_is_committed_again_while_it_is_loaded_is_not_what_is_loaded(
    saves: CheckpointCoordinator, coordinator_of: Open
) -> None:
    save(DcpSaver(saves), 7, {"w": torch.ones(3)}).result(30)

    def commit_again() -> None:
        later = coordinator_of(trigger=CommitsHere(), run_key="later")
        save(DcpSaver(later), 7, {"w": torch.full((3,), 2.0)}).result(30)

    found, reader = {"w": torch.zeros(3)}, StepReader(saves.root, 7)
    with pytest.raises(CheckpointException, match="run 2 has replaced it"):
        dcp.load(found, storage_reader=reader, planner=Meanwhile(commit_again), no_dist=True)
    assert found["w"].tolist() == [1.0] * 3
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["w"].tolist() == [2.0] * 3


def test_a_file_that_others_put_in_the_place_of_a_compared_one_runs_nothing(
    saves: CheckpointCoordinator, tmp_path: Path
) -> None:
    state = {"w": torch.ones(3), "text": "mine" * 1000}
    save(DcpSaver(saves), 7, state).result(30)
    role, ran = step_folder(saves.root, 7) / "actor", tmp_path / "ran"
    index = parse_index((role / ".metadata").read_bytes(), role / ".metadata")
    stored = next(info for at, info in index.storage_data.items() if at.fqn == "text")
    theirs = bytearray((role / stored.relative_path).read_bytes())
    code = pickle.dumps(Runs(ran))
    theirs[stored.offset : stored.offset + len(code)] = code

    def put_theirs() -> None:
        (role / "theirs").write_bytes(theirs)
        (role / "theirs").rename(role / stored.relative_path)

    found = zeros(state)
    dcp.load(
        found, storage_reader=StepReader(saves.root, 7), planner=Meanwhile(put_theirs), no_dist=True
    )
    assert not ran.exists()
    assert not differences(found, state)


def test_each_tensor_of_a_file_of_dcp_is_looked_into(saves: CheckpointCoordinator) -> None:
    """Also one after values of other dtypes, of odd sizes, or of none."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.float16, torch.float64, torch.uint8, torch.int16]
    state: dict[str, Any] = {
        f"{number}.{size}": torch.ones(size).to(dtype)
        for size in (1, 33, 5000, 0)
        for number, dtype in enumerate(dtypes)
    }
    state |= {"turned": torch.ones(70, 30).t(), "scalar": torch.tensor(2.0), "text": "no tensor"}
    state |= {"nested": {"more": [torch.ones(9)]}, "values": torch.get_rng_state()}
    saver = DcpSaver(saves)
    save(saver, 1, state).result()
    (health,) = require_committed(saves.root, 1).health
    floats = [
        each
        for each in [*state.values(), torch.ones(9)]
        if isinstance(each, torch.Tensor) and each.numel()
        if each.is_floating_point() or each.is_complex()
        if each.dtype != torch.float8_e4m3fn
    ]
    assert health.tensors == len(floats)
    assert health.norm == pytest.approx(
        sum(float(each.abs().double().pow(2).sum()) for each in floats) ** 0.5
    )
    assert not health.nonfinite
    state["turned"][3, 5] = float("nan")
    state["7.5000"][-1] = -float("inf")
    save(saver, 2, state).result()
    (health,) = require_committed(saves.root, 2).health
    assert health.nonfinite == 2
    path = step_folder(saves.root, 2) / "actor/.metadata"
    places = parse_index(path.read_bytes(), path).storage_data
    names = {f"at byte {place.offset:,}": index.fqn for index, place in places.items()}
    assert {names[each] for each in health.names} == {"turned", "7.5000"}
