"""The commands that ask a Prefect server: of saves in flight and failed, and of the stack."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.prefect_api import Api, key_of
from tests.integration.test_cli import COMMAND, run
from tests.support.waiting import until
from tests.unit.cli.test_output import check_document
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import require_committed

STATE = {"w": torch.arange(6.0)}


def test_a_failed_save_is_listed_with_its_reason_and_retried(
    saves: CheckpointCoordinator, root: Path, api: Api
) -> None:
    saves.save(1, {"model": STATE})
    saves.wait_all(250)
    in_the_way = root / "global_step_2"
    in_the_way.touch()
    saves.save(2, {"model": STATE})
    with pytest.raises(SaveFailedError):
        saves.wait_all(250)
    in_the_way.unlink()
    api.ended(api.run_of(key_of(root, 2)).id)

    rows = {
        row["step"]: row for row in check_document("runs", run("runs", root, "-o", "json").stdout)
    }
    assert {step: row["status"] for step, row in rows.items()} == {1: "committed", 2: "failed"}
    assert "global_step_2" in rows[2]["reason"]
    assert rows[2]["url"].endswith(f"/runs/flow-run/{rows[2]['flow_run']}")
    assert run("runs", root, "--failed").stdout.startswith("2\t")
    listed = run("ls", root, "-o", "json")
    found = {row["step"]: row for row in check_document("ls", listed.stdout)}
    assert (found[1]["status"], found[2]["status"]) == ("valid", "failed")
    assert f"trinity-sync retry {root} 2" in listed.stderr
    waited = run("wait", root, 2)
    assert (waited.returncode, "global_step_2" in waited.stderr) == (1, True)
    assert f"hint: trinity-sync retry {root} 2" in waited.stderr
    refused = run("retry", root, 1)
    assert (refused.returncode, "it is committed" in refused.stderr) == (1, True)

    retried = check_document("retry", run("retry", root, 2, "-o", "json").stdout)
    assert retried["flow_run"] == rows[2]["flow_run"]
    waited = run("wait", root, 2, "--timeout", 90, "-o", "json")
    (row,) = check_document("wait", waited.stdout)
    assert (row["step"], row["status"]) == (2, "valid")
    require_committed(root, 2)
    assert run("wait", root, "latest").stdout == "step 2 is committed\n"
    late = run("wait", root, 3, "--timeout", 0)
    assert (late.returncode, "is not committed after 0 s" in late.stderr) == (1, True)


def test_a_save_in_flight_is_listed_and_waited_for(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    job = {"write_concurrency": "one"}
    with CheckpointCoordinator(root, job=job, settings=stack_settings) as saves:
        with acquire_file_lock(root / ".trinity_sync/writing.lock"):  # the writer waits for it
            saves.save(5, {"model": STATE})

            def is_writing() -> bool:
                (row,) = check_document("ls", run("ls", root, "-o", "json").stdout) or [{}]
                assert row.get("status") in (None, "pending", "writing")
                return row.get("status") == "writing"

            until(is_writing, "the save in flight")
            (row,) = check_document("runs", run("runs", root, "-o", "json").stdout)
            assert (row["step"], row["status"], row["kind"]) == (5, "writing", "checkpoint")
            late = run("wait", root, "--timeout", 0)  # for all saves in flight
            assert (late.returncode, "step 5" in late.stderr) == (1, True)
            command = [*COMMAND, "wait", str(root), "5", "--timeout", "90"]
            waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            refused = run("retry", root, 5)
            assert (refused.returncode, "it is writing" in refused.stderr) == (1, True)
            assert waiting.poll() is None
        assert waiting.communicate(timeout=250)[0] == "step 5 is committed\n"
        assert waiting.returncode == 0
        saves.wait_all(250)
    assert "no save" in run("wait", root).stderr


def test_the_commands_of_the_stack_print_their_documents(stack: StackState) -> None:
    shown = check_document("up", run("up", "-o", "json").stdout)
    assert shown["services"][0]["url"] == stack.api_url
    assert stack.api_auth  # which only ui, env and join.json may tell
    assert stack.api_auth not in run("status", "-o", "json").stdout
    shown = check_document("ui", run("ui", "-o", "json").stdout)
    assert shown["url"] == stack.api_url.removesuffix("/api")
    assert shown["password"] == stack.api_auth
    assert run("ui").stdout == f"{shown['url']}\npassword: {stack.api_auth}\n"
    assert check_document("deploy", run("deploy", "-o", "json").stdout)
    assert run("logs", "worker", "-n", 1).stdout.count("\n") <= 1
    assert "worker.log" in run("logs").stdout
    first = run("up").stdout.splitlines()[0]
    assert first.startswith(f"Prefect UI: {stack.api_url.removesuffix('/api')}")
