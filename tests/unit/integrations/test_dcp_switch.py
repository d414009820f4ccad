"""A program that saves with DCP is started through the switch; of several ranks see `trainers`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.forked import Program
from tests.support.savers import end_savers
from trinity_sync import CheckpointCoordinator, Settings

PROGRAM = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import async_save, load, save

state = {"w": torch.ones(3), "n": 7}
save(state, checkpoint_id=sys.argv[1] + "/step_1")
async_save(state, checkpoint_id=sys.argv[1] + "/step_2").result()
found = {"w": torch.zeros(3), "n": 0}
load(found, checkpoint_id=sys.argv[1] + "/step_2")
print(__name__, sys.argv[2:], found["n"], found["w"].tolist())
async_save(state, checkpoint_id=sys.argv[1] + "/step_3")  # ends meanwhile
"""


@pytest.fixture
def variables(tmp_path: Path, spool_folder: Path) -> Iterator[dict[str, str]]:
    yield {
        **os.environ,
        "TRINITY_SYNC_ROOT": str(tmp_path / "saves"),
        "TRINITY_SYNC_SPOOL": str(spool_folder),
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SAVER": "auto",
        "PYTHONPATH": os.pathsep.join((str(Path.cwd()), str(tmp_path))),
    }
    end_savers(spool_folder)


def run(folder: Path, variables: dict[str, str], *named: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "trinity_sync.integrations.dcp.switch", *named]
    return subprocess.run(
        [*command, str(folder), "--steps", "2"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def run_code(code: str, folder: Path, variables: dict[str, str], *more: Path) -> tuple[str, str]:
    """Run a program to its end; return what it has printed, and its log."""
    program = Program(code, folder, *more, env=variables, talks=True)
    try:
        said = program.stdout.read(), program.stderr.read()
        program.end()
    finally:
        program.clear()
    return said


@pytest.mark.parametrize("named", [["program.py"], ["-m", "program"]])
def test_a_program_is_started_as_by_python_and_its_folders_are_those_of_commits(
    tmp_path: Path, variables: dict[str, str], named: list[str]
) -> None:
    done = run(tmp_path, variables, *named)
    assert done.stdout.strip() == "__main__ ['--steps', '2'] 7 [1.0, 1.0, 1.0]", done.stderr
    found = {path.parent.name for path in tmp_path.glob("*/.trinity_sync.json")}
    assert found == {"step_1", "step_2", "step_3"}
    assert "retrying" not in done.stderr


def test_a_switch_without_a_root_is_refused(variables: dict[str, str]) -> None:
    del variables["TRINITY_SYNC_ROOT"]
    said = Program("import trinity_sync.integrations.dcp.switch", env=variables).end(1)
    assert "TRINITY_SYNC_ROOT is not set" in said


SECOND = """
import os, sys
from trinity_sync.storage import runs
runs.WAIT_S = 0.0
import trinity_sync.integrations.dcp.switch
import torch
import torch.distributed.checkpoint as dcp
state = {"w": torch.ones(3)}
dcp.save(state, checkpoint_id=sys.argv[1] + "/critic")
if child := os.fork():
    os.waitpid(child, 0)
else:
    dcp.save(state, checkpoint_id=sys.argv[1] + "/evaluation")
"""


def test_a_second_program_with_the_root_and_a_forked_child_save_by_dcp(
    tmp_path: Path, variables: dict[str, str], settings: Settings
) -> None:
    """As a critic's process group beside the actor's."""
    with CheckpointCoordinator(tmp_path / "saves", settings=settings) as first:
        first.begin()
        _, log = run_code(SECOND, tmp_path, variables)
    assert "what this process saves is saved by DCP" in log
    for name in ("critic", "evaluation"):
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found["w"].all()
        assert not (tmp_path / name / ".trinity_sync.json").exists()


WITH_OWN_PLANNER = """
import sys
from pathlib import Path
import trinity_sync.integrations.dcp.switch
import torch
import torch.distributed.checkpoint as dcp
class Planner(dcp.DefaultSavePlanner):
    pass
folder = sys.argv[1] + "/last"
def read_newest():
    newest = sorted(Path(sys.argv[1]).glob("saves/global_step_*"))[-1] / "actor"
    return {path: path.read_bytes() for path in newest.iterdir()}
for value, call in ((1.0, dcp.save), (2.0, dcp.async_save)):
    for sign, planner in ((1, None), (-1, Planner())):
        done = call({"w": torch.full((3,), sign * value)}, checkpoint_id=folder, planner=planner)
        if done and hasattr(done, "result"):
            done.result()
        if planner is None:
            committed = read_newest()
        state = {"w": torch.zeros(3)}
        dcp.load(state, checkpoint_id=folder)  # as the newest save, whoever has made that
        print(state["w"].tolist())
    assert read_newest() == committed
dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
committed = read_newest()
writer = dcp.FileSystemWriter(folder)  # without a call of dcp
with writer.fs.create_stream(Path(folder) / "__0_0.distcp", "wb") as stream:
    stream.write(b"x")
assert read_newest() == committed
"""


def test_a_save_that_remains_that_of_dcp_does_not_write_into_a_committed_step(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    said, log = run_code(WITH_OWN_PLANNER, tmp_path, variables)
    assert said.splitlines() == [str([n] * 3) for n in (1.0, -1.0, 2.0, -2.0)], log


LEFT_TO_DCP = """
import sys, threading
import trinity_sync.integrations.dcp.switch
import torch.distributed.checkpoint as dcp

class OwnPlanner(dcp.DefaultSavePlanner):
    pass

def save(**options):
    dcp.save({"n": 1}, **{"checkpoint_id": sys.argv[1] + "/step_1"} | options)

for _ in range(2):
    save(no_dist=True)
    save(planner=OwnPlanner())
    save(checkpoint_id=sys.argv[2])
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    for call in dcp.save, dcp.async_save:
        try:
            call({}, checkpoint_id=sys.argv[1] + "/step_2", of_later=1)
        except TypeError as error:
            print(error)
"""


def test_what_remains_to_dcp_is_logged_once_for_each_reason(
    tmp_path: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    said, log = run_code(LEFT_TO_DCP, tmp_path, variables, outside)
    unexpected = "() got an unexpected keyword argument 'of_later'"
    assert said.splitlines() == ["save" + unexpected, "async_save" + unexpected] * 2, log
    assert not (tmp_path / "step_2").exists()
    told = [line for line in log.splitlines() if line.startswith("DCP itself saves")]
    why = [
        "with no_dist",
        "with a planner of another class",
        "with another thread",
        "with of_later",
    ]
    why.insert(2, f"to {outside}, which is not next to {tmp_path / 'saves'}")
    assert told == [f"DCP itself saves what is saved {each}" for each in why], log
