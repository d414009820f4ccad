"""The selftest, as someone runs it after `pip install`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import Program
from tests.support.savers import await_that


def run(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"TRINITY_SYNC_SAVER": "auto", "TRINITY_SYNC_HOME": str(cwd / "home")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize("start", ["python", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_what_is_promised_is_tried_and_written_down(
    tmp_path: Path, spool_folder: Path, start: str
) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = ["-m", "trinity_sync.selftest", "--mib", "8", "--json", "found.json"]
    done = run(
        tmp_path,
        *(launcher if start == "torchrun" else []),
        *arguments,
        TRINITY_SYNC_SPOOL=str(spool_folder),
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert all(each["is_ok"] for each in results.values())
    alone = ["save cpu", "overlap cpu", "kill cpu", "weights cpu", "broadcast cpu cpu"]
    assert [*results] == (["ranks"] if start == "torchrun" else alone)
    assert all(name in done.stdout for name in results)
    assert {path.name for path in tmp_path.iterdir()} <= {"found.json", "home"}
    await_that(lambda: not [*spool_folder.glob("*/*.slot*")], "the saver removes what is left")


def test_a_machine_that_cannot_save_is_told_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    own = {"MASTER_PORT": "0", "TRINITY_SYNC_SPOOL": f"{tmp_path}/spool", "TMPDIR": f"{tmp_path}"}
    main = "import runpy; runpy.run_module('trinity_sync.selftest', run_name='__main__')"
    arguments = ("--mib", 1, "--json", tmp_path / "found.json")
    said = Program(main, *arguments, env=os.environ | alone | own).end(1)
    assert "FAILED  ranks               SpoolError: " in said
