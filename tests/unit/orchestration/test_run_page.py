"""What the Prefect UI shows of a save: how it went, or what failed, what is safe, what to type."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.job import Job
from trinity_sync.errors import SaveError
from trinity_sync.layout import KINDS, name_job
from trinity_sync.orchestration import step_events
from trinity_sync.orchestration.quantities import format_bytes, format_duration
from trinity_sync.orchestration.run_page import (
    FailedTask,
    SaveFailure,
    describe_commit,
    describe_failure,
    make_failed_task,
)
from trinity_sync.storage.commit import commit


def test_the_page_of_a_commit_says_first_how_it_went(job: Job) -> None:
    job.stage(40, {"model": {"w": torch.zeros(9)}, "optim": {"w": torch.zeros(99)}})
    written = job.persist(40, "model", "optim")
    submitted = written[0].submitted_at
    manifest = commit(
        job.save(40),
        written,
        started_at=submitted + 0.25,
        persisted_at=submitted + 1.25,
        clock=lambda: submitted + 1.5,
    )
    page = describe_commit(job.request(40), manifest, written)
    assert page.startswith(f"### {name_job(job.root)}: save actor step 40: committed\n")
    for words in (
        f"**{format_duration(written[0].stall_s)}** (slowest rank: 0)",
        "**1.5 s** = queue 0.25 + write 1.00 + commit 0.25 s",
        f"{format_bytes(manifest.nbytes)}, 2 files, 1 rank on 1 node",
        f"trinity-sync show {job.root} 40",
        f"trinity-sync report {job.root}",
        "| model | `here` | 1 |",
        "| optim | `here` | 1 |",
    ):
        assert words in page, page
    assert manifest.files[0].digest not in page


def test_the_page_of_a_failure_says_what_failed_what_is_safe_and_what_to_type(job: Job) -> None:
    tasks = [FailedTask("node-3", "optim", "no space | left", "/ckpts/optim_rank_3.pt")]
    failure = SaveFailure("failed", "cannot write\noptim", tasks, 30, {"node-3": 4, "node-4": 0})
    page = describe_failure(job.request(40), failure)
    for words in (
        "save actor step 40: failed",
        "> cannot write\n> optim",
        "| `node-3` | optim | `/ckpts/optim_rank_3.pt` | no space \\| left |",
        "step 30 is the newest committed one",
        "4 images still in memory (4 on `node-3`)",
        f"trinity-sync retry {job.root} 40",
    ):
        assert words in page, page
    for outcome in ("evicted", "superseded"):
        page = describe_failure(job.request(40), SaveFailure(outcome, "why"))  # type: ignore[arg-type]
        assert "trinity-sync retry" not in page
        assert "no longer in memory" in page
    error = SaveError("cannot write it", path=Path("/ckpts/a.pt"), rank=3)
    sent = pickle.loads(pickle.dumps(error))  # by Ray
    failed = make_failed_task("here", "model", sent)
    assert (failed.what, failed.path) == ("model of rank 3", "/ckpts/a.pt")
    assert make_failed_task("here", "model", SaveError("no")) == FailedTask("here", "model", "no")


def test_the_pages_of_a_save_on_many_nodes_stay_short(job: Job) -> None:
    names = [f"node-{number}" for number in range(3000)]
    tasks = [FailedTask(name, "optim", "no space left") for name in names]
    failure = SaveFailure("failed", "no space left", tasks, 30, dict.fromkeys(names, 8))
    page = describe_failure(job.request(40), failure)
    assert "| `node-0` | optim |" in page
    assert "| and 2,900 more |  |  | on 2,900 nodes: see the logs |" in page
    assert "24,000 images still in memory (8 on `node-0`, " in page
    assert "8 on `node-99`, and on 2,900 more nodes)" in page
    assert len(page) < 10_000

    job.stage(40, {"model": {"w": torch.zeros(9)}})
    (file,) = job.persist(40)
    manifest = commit(job.save(40), [file])
    written = [replace(file, node=name) for name in names]
    page = describe_commit(job.request(40), manifest, written)
    assert "| model | 3,000 nodes | 3,000 |" in page
    assert len(page) < 10_000


def test_durations_are_short() -> None:
    texts = {0: "0 ms", 0.1062: "106 ms", 2.44: "2.4 s", 42: "42 s", 99.9: "2 min", 840: "14 min"}
    texts |= {5400: "1.5 h", 12 * 86400: "12 d"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts


def test_an_eviction_is_an_event_of_a_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr(step_events, "emit_event", lambda **event: sent.append(event))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        for outcome in ("evicted", "failed"):
            for kind in KINDS:
                step_events.emit_step_event(outcome, tmp_path, 1, job="ckpts", run=1, kind=kind)
    found = [(each["event"].rpartition(".")[2], each["payload"]["kind"]) for each in sent]
    assert ("evicted", "checkpoint") in found
    assert ("evicted", "state_dict") not in found
    assert [kind for outcome, kind in found if outcome == "failed"] == [*KINDS]
