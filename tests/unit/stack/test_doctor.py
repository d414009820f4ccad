"""What is wrong is found and comes with what to do; looking changes nothing."""

import importlib.metadata
import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import prefect
import pytest
import torch

from tests.conftest import environment
from tests.support.answers import server
from tests.support.job import Job
from tests.support.restricted import restricted
from trinity_sync.cli.app import PROBLEM_FOUND
from trinity_sync.client.prefect_connection import compute_clock_skew
from trinity_sync.layout import step_folder
from trinity_sync.orchestration.quantities import format_bytes
from trinity_sync.settings import Settings
from trinity_sync.stack import doctor, local_stack
from trinity_sync.stack.doctor import Check, check_logout, check_packages, run_checks
from trinity_sync.stack.doctor_job import check_root


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    with environment({}):
        yield


@pytest.fixture
def committed(job: Job) -> Job:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    return job


def checks(job: Job, spool: Path | None = None) -> dict[str, Check]:
    settings = Settings(home=job.root / "no home", spool=spool or job.spool.folder.parent)
    return {check.name: check for check in run_checks(settings, job.root)}


def states(job: Job) -> dict[str, str]:
    return {name: check.state for name, check in checks(job).items()}


def test_a_job_in_order_is_ok_and_is_left_as_it_was(committed: Job) -> None:
    before = sorted(committed.root.rglob("*"))
    found = states(committed)
    ours = ("spool", "disk", "steps", "room for images")
    for name in (*ours, "file system", "locks between processes", "atomic rename of a folder"):
        assert found[name] == "ok"
    assert sorted(committed.root.rglob("*")) == before


def test_what_is_away_fails_with_what_to_do(committed: Job) -> None:
    found = checks(committed)
    for name in ("prefect server", "ray"):
        assert found[name].state == "fail"
        assert "trinity-sync up" in found[name].todo
    with environment(
        {
            "PREFECT_API_URL": "http://127.0.0.1:9/api",
            "TRINITY_SYNC_STACK__RAY__ADDRESS": "127.0.0.1:9",
        }
    ):
        found = checks(committed)
    assert "127.0.0.1:9" in found["prefect server"].found
    assert "127.0.0.1:9" in found["ray"].found


def test_a_server_that_wants_a_login_is_asked_with_it(committed: Job) -> None:
    version = {"/admin/version": (200, f'"{prefect.__version__}"')}
    with server(version, login="who:what") as url, environment({"PREFECT_API_URL": url}):
        with environment({"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": "who:what"}):
            found = checks(committed)
        assert found["prefect server"].state == "ok"
        assert found["work pool"].found == "there is no work pool trinity-sync"
        found = checks(committed)
        assert found["prefect server"].found.endswith("(401): the password is missing or wrong")
        assert found["prefect server"].todo.startswith(
            "Set PREFECT_API_AUTH_STRING to the server's"
        )


def test_an_environment_without_the_stack_asks_its_server(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "list_missing_packages", lambda: ["prefect", "ray"])

    def find_no_version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    pool = {"name": "trinity-sync", "type": "trinity-sync", "is_paused": True}
    known = {
        "/admin/version": (200, '"3.8.8"'),
        "/work_pools/trinity-sync/": (200, "[]"),
        "/work_pools/trinity-sync": (200, json.dumps(pool)),
        "/flow_runs/count": (200, "3"),
        "/deployments/filter": (200, "[]"),
    }
    with server(known) as url, environment({"PREFECT_API_URL": url}):
        monkeypatch.setattr(importlib.metadata, "version", find_no_version)
        found = checks(committed)
    assert found["prefect server"].state == "ok"
    assert "paused: work pool trinity-sync" in found["work pool"].found
    assert (found["worker"].state, found["worker"].found) == ("fail", "0 online, 3 runs waiting")


def test_a_home_without_room_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for least, fails in ((0, False), (1 << 62, True)):
        monkeypatch.setattr(local_stack, "LEAST_ROOM", least)
        found = [each.state for each in run_checks(Settings(home=tmp_path)) if each.name == "home"]
        assert ("fail" in found) is fails


def test_a_home_in_a_folder_that_is_cleaned_is_a_warning(tmp_path: Path) -> None:
    (home := Path(tempfile.mkdtemp(dir="/var/tmp"))).chmod(0o700)
    try:
        found = {check.name: check for check in run_checks(Settings(home=home, spool=tmp_path))}
    finally:
        home.rmdir()
    assert (found["home"].state, f"{home} is in /var/tmp" in found["home"].found) == ("warn", True)
    elsewhere = run_checks(Settings(home=Path.home(), spool=tmp_path))
    assert "home" not in {check.name for check in elsewhere}


def test_a_spool_open_to_others_fails_one_on_a_disk_is_a_warning_and_a_missing_one_is_not(
    committed: Job, tmp_path: Path
) -> None:
    spool = committed.spool.folder.parent
    spool.chmod(0o755)
    found = checks(committed)["spool"]
    assert (found.state, found.todo.startswith(f"run: chmod 700 {spool}")) == ("fail", True)
    assert checks(committed, spool=tmp_path / "none")["spool"].state == "ok"
    assert not (tmp_path / "none").exists()
    (tmp_path / "spool").mkdir(mode=0o700)
    assert checks(committed, spool=tmp_path / "spool")["spool"].state == "warn"


def test_a_step_that_is_cut_and_files_beside_a_commit_are_a_warning(committed: Job) -> None:
    (committed.root / "global_step_9").mkdir()
    found = checks(committed)
    assert (found["steps"].state, "[9]" in found["steps"].found) == ("warn", True)
    (step_folder(committed.root, 9)).rmdir()
    (step_folder(committed.root, 4) / "data.pt").touch()
    found = checks(committed)["steps"]
    assert (found.state, "files beside the commit: [4]" in found.found) == ("warn", True)


def test_images_that_wait_for_long_and_torn_tickets_are_named(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed.stage(5, {"model": {"w": torch.zeros(3)}})
    committed.stager().memory.close()  # whose thread may map another slot
    name = f"images of {committed.spool.folder.name}"
    used = format_bytes(committed.spool.bytes_used)
    found = checks(committed)[name]
    assert (found.state, found.found) == ("ok", f"{used} in memory, 1 wait to be persisted")
    monkeypatch.setattr(doctor, "STALE_S", 0.0)
    later = checks(committed)
    assert (later[name].state, "steps [5]" in later[name].found) == ("warn", True)
    (ticket,) = committed.spool.folder.glob("*.ticket")
    ticket.write_text("{")
    assert states(committed)[name] == "fail"


def test_how_far_a_servers_clock_is_ahead_goes_by_the_second_that_its_answer_names() -> None:
    date = "Sun, 22 Nov 2026 05:00:10 GMT"
    theirs = datetime(2026, 11, 22, 5, 0, 10, tzinfo=UTC).timestamp()
    assert compute_clock_skew(date, theirs - 31, theirs - 30) == 30
    assert compute_clock_skew(date, theirs + 31, theirs + 32) == -30
    assert compute_clock_skew(date, theirs + 0.1, theirs + 0.9) == 0
    assert (
        compute_clock_skew(date, theirs - 5, theirs + 0.9) == 0
    )  # it was asked long before it answered
    assert compute_clock_skew(None, theirs, theirs) == 0


def test_images_of_a_job_whose_root_is_gone_are_named(committed: Job) -> None:
    committed.stage(5, {"model": {"w": torch.zeros(3)}})
    committed.root.rename(committed.root.with_name("moved"))
    settings = Settings(home=committed.root / "none", spool=committed.spool.folder.parent)
    found = {check.name: check for check in run_checks(settings)}
    mine = found[f"images of {committed.spool.folder.name}"]
    assert (mine.state, str(committed.root) in mine.found) == ("warn", True)
    assert f"rm -r {committed.spool.folder}" in mine.todo


def test_what_the_file_system_of_a_root_lacks_is_named(tmp_path: Path) -> None:
    with restricted(tmp_path, "flock") as root:
        found = {check.name: check for check in check_root(root, Settings())}
    assert found["locks between processes"].state == "fail"
    assert "docs/concepts/file-systems.md" in found["locks between processes"].todo
    assert "which other nodes may see" in found["file system"].found


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_root_that_cannot_be_written_fails(committed: Job) -> None:
    committed.root.chmod(0o500)
    assert states(committed)["root"] == "fail"


def test_packages_out_of_their_range_or_missing_are_named() -> None:
    found = check_packages(["typer<0.1", "no-such-package>=1", "rich>=1", "x; extra == 'dev'"])
    assert found.state == "fail"
    assert "typer is " in found.found
    assert "no-such-package is missing" in found.found
    assert "rich" not in found.found
    assert check_packages(["rich>=1"]).state == "ok"


def test_a_prefect_of_an_unsupported_version_is_a_failed_check_and_stops_no_other(
    tmp_path: Path,
) -> None:
    (tmp_path / "prefect-3.4.0.dist-info").mkdir()
    (tmp_path / "prefect-3.4.0.dist-info/METADATA").write_text("Name: prefect\nVersion: 3.4.0\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import prefect.flow_engine; del prefect.flow_engine.run_flow\n"
        "from trinity_sync.cli import main; main()"
    )
    with environment({"TRINITY_SYNC_HOME": str(tmp_path / "home")}):
        done = subprocess.run(
            [sys.executable, "-c", program, "doctor", "-o", "json"], capture_output=True, text=True
        )
    assert (done.returncode, done.stderr) == (PROBLEM_FOUND, "")
    found = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert "prefect is 3.4.0, not " in found["packages"]["message"]
    assert "no Prefect server is known" in found["prefect server"]["message"]
    assert found["spool"]["status"] == "ok"


@pytest.fixture
def logind(tmp_path: Path) -> Iterator[Path]:
    """A ``busctl`` that answers as that of a node with systemd, what ``answer`` in its folder says.

    No systemd runs where these tests do.
    """
    command = tmp_path / "bin/busctl"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $* > {command}.asked\ncat {tmp_path}/answer\n")
    command.chmod(0o755)
    with environment({"PATH": f"{command.parent}:{os.environ['PATH']}"}):
        yield tmp_path


@pytest.fixture
def user() -> pwd.struct_passwd:
    """A user of this machine, not a system user."""
    return next(user for user in pwd.getpwall() if user.pw_uid > 999)


def test_a_spool_is_warned_of_only_if_systemd_removes_it_at_logout(
    logind: Path, user: pwd.struct_passwd
) -> None:
    spool, uid = Path("/dev/shm/trinity_sync-test"), user.pw_uid
    (logind / "answer").write_text("b true\n")
    found = check_logout(spool, uid, logind)
    assert (found.state, "RemoveIPC" in found.found) == ("warn", True)
    assert f"loginctl enable-linger {user.pw_name}" in found.todo
    asked = (logind / "bin/busctl.asked").read_text().split()
    assert asked[1:] == ["org.freedesktop.login1", "/org/freedesktop/login1", asked[3], "RemoveIPC"]
    assert check_logout(spool, 0, logind) is None  # root's, as those of system users, stay
    assert check_logout(logind, uid, logind) is None
    (logind / "answer").write_text("b false\n")
    assert check_logout(spool, uid, logind) is None
    (logind / "answer").write_text("b true\n")
    assert check_logout(spool, uid, logind)
    (logind / user.pw_name).touch()  # lingers
    assert check_logout(spool, uid, logind) is None


def test_a_node_without_systemd_has_no_warning_of_it(user: pwd.struct_passwd) -> None:
    assert check_logout(Path("/dev/shm/trinity_sync-test"), user.pw_uid) is None
