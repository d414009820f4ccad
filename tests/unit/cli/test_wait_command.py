"""The command that waits for saves, against a Prefect server of a few lines."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.answers import serving
from tests.support.command import invoke
from tests.support.steps import commit_files
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.runs import hold_run, open_run


def flow_run(step: int, run: int, kind: str, state: str, attempt: int = 1) -> dict[str, Any]:
    """A flow run of a save, as the server describes it."""
    request = SaveRequest(root="/ckpts", step=step, run=run, kind=kind, attempt=attempt)
    return describe(request, state)


def describe(
    request: SaveRequest, state: str, starts: int = 0, at: str = "2026-01-02T03:04:05Z"
) -> dict[str, Any]:
    return {
        "id": f"00000000-0000-0000-0000-{request.run:012}",
        "idempotency_key": request.key,
        "run_count": starts,
        "name": request.flow_run_name,
        "tags": request.tags,
        "state": {"type": state, "name": state.title(), "timestamp": at},
    }


@contextmanager
def serve(answer: Callable[[Any], list[dict[str, Any]]]) -> Iterator[str]:
    """Run a server that answers each question for flow runs; yields its URL."""

    def answer_request(_: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
        return 200, json.dumps(answer(json.loads(body)["flow_runs"]["tags"]["all_"]))

    with serving(answer_request) as url:
        yield f"{url}/api"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job whose step 40 is superseded: its second run began at step 20."""
    root = tmp_path / "ckpts"
    for step in (20, 40):
        commit_files(root, step)
    open_run(root, "first", 0)
    open_run(root, "second", 20)
    return root


def wait(root: Path, url: str, *arguments: object) -> Result:
    return invoke("wait", root, *arguments, env={"PREFECT_API_URL": url})


def test_a_superseded_step_is_waited_for_only_while_it_may_be_saved_again(root: Path) -> None:
    superseded = "step 40 of run 1 in .* is superseded: run 2 resumed from step 20"
    with serve(lambda _: [flow_run(40, 1, "checkpoint", "COMPLETED")]) as url:
        with hold_run(root, 2):
            late = wait(root, url, 40, "--timeout", 0.5)
        assert (late.exit_code, "not committed after 0.5 s" in late.stderr) == (1, True)
        done = wait(root, url, 40, "--timeout", 600)
        assert (done.exit_code, "not committed after" in done.stderr) == (1, False)
    for each in (late, done):
        assert re.search(superseded, each.stderr)
    with serve(lambda _: [flow_run(40, 2, "checkpoint", "FAILED")]) as url:
        failed = wait(root, url, 40, "--timeout", 60)
    assert (failed.exit_code, "the save of step 40" in failed.stderr) == (1, True)

    def answer(tags: list[str]) -> list[dict[str, Any]]:
        commit_files(root, 40, run=2)
        return [
            flow_run(40, 2, "checkpoint", "RUNNING"),
            flow_run(40, 1, "checkpoint", "COMPLETED"),
        ]

    with serve(answer) as url:
        done = wait(root, url, 40, "-o", "json")
    (row,) = json.loads(done.stdout)["steps"]
    assert (done.exit_code, row["run"], row["status"]) == (0, 2, "valid")


def test_all_saves_in_flight_are_waited_for_although_the_step_has_another(root: Path) -> None:
    commit_files(root, 30, run=2, kind="state_dict")

    def answer(tags: list[str]) -> list[dict[str, Any]]:
        if "step:30" in tags:
            commit_files(root, 30, run=2, nbytes=5000)
        return [
            flow_run(30, 2, "checkpoint", "RUNNING"),
            flow_run(30, 2, "state_dict", "COMPLETED"),
        ]

    with serve(answer) as url:
        done = wait(root, url, "-o", "json")
    (row,) = json.loads(done.stdout)["steps"]
    assert (row["step"], row["bytes"]) == (30, 5002)


def test_a_save_in_flight_that_fails_ends_the_wait_although_another_goes_on(root: Path) -> None:
    def answer(tags: list[str]) -> list[dict[str, Any]]:
        state = "FAILED" if "step:30" in tags else "RUNNING"
        return [flow_run(30, 2, "state_dict", "RUNNING"), flow_run(30, 2, "checkpoint", state)]

    with serve(answer) as url:
        failed = wait(root, url, "--timeout", 60)
    assert (failed.exit_code, "the save of step 30" in failed.stderr) == (1, True)


def of_a_user() -> list[dict[str, Any]]:
    copy = {**flow_run(30, 2, "checkpoint", "CANCELLED"), "idempotency_key": None, "name": "a"}
    return [copy, flow_run(30, 2, "checkpoint", "RUNNING")]


def at_a_limit() -> list[dict[str, Any]]:
    run = flow_run(30, 2, "checkpoint", "CANCELLED")
    return [{**run, "state": {**run["state"], "message": "Deployment concurrency limit reached."}}]


@pytest.mark.parametrize("make_runs", [of_a_user, at_a_limit])
def test_a_cancelled_run_that_is_no_end_of_its_save_ends_no_wait(
    root: Path, make_runs: Callable[[], list[dict[str, Any]]]
) -> None:
    looks = count()

    def answer(tags: list[str]) -> list[dict[str, Any]]:
        if next(looks) == 2:
            commit_files(root, 30, run=2)
        return make_runs()

    with serve(answer) as url:
        done = wait(root, url, "--timeout", 60)
    assert (done.exit_code, "step 30 is committed" in done.stdout) == (0, True)


def test_the_attempt_that_failed_of_a_save_that_was_submitted_again_ends_no_wait(
    root: Path,
) -> None:
    asked = []

    def answer(tags: list[str]) -> list[dict[str, Any]]:
        asked.append(tags)
        if len(asked) == 3:  # the second question about the step
            commit_files(root, 50, run=2)
        return [
            flow_run(50, 2, "checkpoint", "FAILED"),
            flow_run(50, 2, "checkpoint", "RUNNING", attempt=2),
        ]

    with serve(answer) as url:
        done = wait(root, url)
    assert (done.exit_code, done.stdout) == (0, "step 50 is committed\n")


def test_a_server_that_never_answers_does_not_prolong_the_wait(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        late = wait(root, url, 50, "--timeout", 0.5)
        assert (late.exit_code, "not committed after 0.5 s" in late.stderr) == (1, True)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was asked once
            silent.accept()
        refused = wait(root, url, "--timeout", 0.5)
    assert (refused.exit_code, "does not answer within 2 s" in refused.stderr) == (4, True)
