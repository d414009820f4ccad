"""Whoever waits for a save hears of its end, whatever the file system does meanwhile."""

import itertools
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.answers import server
from tests.unit.job import Job
from trinity_sync.errors import SaveTimeout
from trinity_sync.orchestration.trigger import Outcome, SaveTrigger
from trinity_sync.orchestration.watch import SaveWatch
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.storage.manifest import is_committed


def test_an_error_of_the_file_system_ends_no_watch(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    job.commit(4)
    pointer = job.root / "latest_checkpointed_iteration.txt"
    pointer.rename(job.root / "aside")
    pointer.mkdir()  # to read it is an OSError that is no FileNotFoundError
    watch = SaveWatch(SaveTrigger(Settings(), "http://127.0.0.1:9/api"))
    request = SaveRequest(root=str(job.root), step=4, run=1)
    with caplog.at_level(logging.WARNING):
        watch.add(request)
        with pytest.raises(SaveTimeout, match="step4"):
            watch.wait(time.monotonic() + 0.5)
        pointer.rmdir()
        (job.root / "aside").rename(pointer)
        assert watch.wait(time.monotonic() + 30) == []
    watch.close()
    assert len([each for each in caplog.records if "cannot be followed" in each.message]) == 1


def test_who_waits_for_long_is_told_once_what_for(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.orchestration.watch.SAY_S", 0.1)
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watch = SaveWatch(SaveTrigger(Settings(), "http://127.0.0.1:9/api"))
    watch.add(SaveRequest(root=str(job.root), step=4, run=1))
    with caplog.at_level(logging.WARNING), pytest.raises(SaveTimeout):
        watch.wait(time.monotonic() + 0.5)
    watch.close()
    (said,) = [each.message for each in caplog.records if "still waiting" in each.message]
    assert "save actor step 4" in said


def requests_in(root: Path, steps: Iterable[int]) -> list[SaveRequest]:
    return [SaveRequest(root=str(root), step=step, run=1) for step in steps]


def keys_in(question: tuple[str, str]) -> set[str]:
    """The saves that one request to the server asks for."""
    path, body = question
    assert path == "/flow_runs/filter"
    return set(json.loads(body)["flow_runs"]["idempotency_key"]["any_"])


def test_the_server_is_asked_one_question_for_all_pending_saves(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    requests = requests_in(tmp_path, range(20))
    answers = {"/flow_runs/filter": (200, "[]"), "/admin/version": (200, '"3.8.8"')}
    questions: list[set[str]] = []
    with server(answers, asked=asked) as url:
        watch = SaveWatch(SaveTrigger(Settings(), url))
        for request in requests:
            watch.add(request)
        while {request.key for request in requests} not in questions:
            with pytest.raises(SaveTimeout):
                watch.wait(time.monotonic() + 0.1)
            questions = [keys_in(each) for each in asked if each[0] == "/flow_runs/filter"]
            assert len(questions) < len(requests)
        watch.close()


class Away(SaveTrigger):
    """A server that cannot be asked; notes when it was tried, and for how many saves."""

    def __init__(self) -> None:
        self.tried: list[tuple[float, int]] = []
        self.enough = threading.Event()

    def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        self.tried.append((time.monotonic(), len(requests)))
        if len(self.tried) == 6:
            self.enough.set()
        return {request.key: Outcome("unknown") for request in requests}


def gaps(moments: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]


def test_a_server_that_is_away_is_asked_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.orchestration.watch.ASK_S", (0.02, 0.2))
    away = Away()
    watch = SaveWatch(away)
    for request in requests_in(tmp_path, range(20)):
        watch.add(request)
    assert away.enough.wait(30)
    watch.close()
    least = [0.04, 0.08, 0.16, 0.2, 0.2]
    waited = gaps([moment for moment, _ in away.tried[:6]])
    assert all(gap >= at_least for gap, at_least in zip(waited, least, strict=True))
    assert away.tried[-1][1] == 20


def test_the_root_is_looked_at_less_often_for_an_old_save_and_at_once_for_a_new_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.orchestration.watch.LOOK_S", (0.01, 0.3))
    looks: dict[int, list[float]] = defaultdict(list)
    enough = threading.Event()

    def noted(root: str, run: int, step: int, *others: Any) -> bool:
        looks[step].append(time.monotonic())
        if len(looks[9]) == 4:
            enough.set()
        return is_committed(root, run, step, *others)

    monkeypatch.setattr("trinity_sync.orchestration.watch.is_committed", noted)
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watch = SaveWatch(Away())
    old, young = requests_in(job.root, (9, 4))
    watch.add(old)
    watch._pending[old.key].since -= 3600
    assert enough.wait(30)
    assert all(gap >= 0.3 for gap in gaps(looks[9][1:]))
    job.commit(4)
    watch.add(young)
    with pytest.raises(SaveTimeout, match="step9"):
        watch.wait(time.monotonic() + 0.2)
    watch.close()
    assert young.key in watch.commit_seconds
