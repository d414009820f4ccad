"""Retention as users meet it: after each save, on a schedule, by hand, and on the command line."""

import json
from pathlib import Path

import torch

from tests.integration.conftest import CommitStep
from tests.integration.prefect_api import Api
from tests.integration.test_cli import run
from tests.support.leases import acquire_lease
from trinity_sync.layout import name_job, steps_on_disk
from trinity_sync.orchestration.quantities import make_artifact_key

STATE = {"w": torch.arange(5000.0)}


def test_the_flow_shows_its_plan_and_then_carries_it_out(
    api: Api, root: Path, commit_step: CommitStep
) -> None:
    for step in (1, 2, 3):
        commit_step(step)
    wanted = {"root": str(root), "keep": "last=1"}
    trial = api.ended(api.start({**wanted, "dry_run": True}, "retention/retention"))
    (artifact,) = api.artifacts_of(trial)
    rows = json.loads(artifact.data)
    assert [row["state"] for row in rows] == ["would be removed", "would be removed", "kept"]
    assert steps_on_disk(root) == [1, 2, 3]
    with acquire_lease(root, 2, "explorer"):
        done = api.ended(api.start(wanted, "retention/retention"))
    (artifact,) = api.artifacts_of(done)
    rows = {row["step"]: row for row in json.loads(artifact.data)}
    assert rows[2]["why"] == "leased by explorer"
    assert artifact.key == make_artifact_key("retention", root)
    assert done.name == f"{name_job(root)}: retention"
    assert f"1 steps of `{root}` removed, 2.0 kB" in artifact.description
    assert steps_on_disk(root) == [2, 3]


def test_prune_keeps_all_checkpoints_unless_it_is_asked(
    root: Path, commit_step: CommitStep
) -> None:
    for step in (1, 2, 3, 4):
        commit_step(step, kind="state_dict" if step < 4 else "checkpoint")
    commit_step(5)
    run("prune", root, "--yes")
    assert steps_on_disk(root) == [2, 3, 4, 5]
