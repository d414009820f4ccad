"""Every byte of every small file is flipped, and every file is cut at every length.

Whatever is altered, the product resumes from a step that was committed, with the state that was
saved, keeps what is pinned, refuses what was superseded; or it says in an error of its own what is
wrong. What becomes of altered shards `test_verify` and `test_restore` of `tests/unit/storage` show.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.catalog import is_current, list_jobs, mirror, open_catalog
from trinity_sync.errors import CatalogError, CommitError, SupersededError, TrinitySyncError
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import ITERATION_FILES, KINDS, step_folder
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    mark_corrupted,
    read_latest_pointer,
    repair_latest_pointer,
    require_committed,
)
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import find_newest_run, open_run, refuse_superseded
from trinity_sync.storage.save_functions import FunctionStatus, read_statuses, write_status
from trinity_sync.storage.steps_in_use import list_steps_in_use, pin, tag

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def root(job: Job) -> Path:
    """Run 1 has committed steps 1 and 2, run 2 resumed from step 2 and has committed step 3."""
    for run, steps, begin in ((1, (1, 2), 0), (2, (3,), 2)):
        open_run(job.root, str(run), begin)
        for step in steps:
            job.stage(step, {"model": {"w": torch.full((50,), float(step))}}, run=run)
            job.commit(step, run=run)
    return job.root


def altered(path: Path, every: int = 1) -> Iterator[str]:
    """Alters a file in one place after the other; yields where, and puts it right at the end."""
    good = path.read_bytes()
    try:
        for at in range(0, len(good), every):
            for byte in {good[at] ^ 1, good[at] ^ 1 << at % 8, ord("e")} - {good[at]}:
                path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
                yield f"byte {at} of {path.name} is {byte}"
        for nbytes in range(0, len(good), 3 * every):
            path.write_bytes(good[:nbytes])
            yield f"{path.name} is cut to {nbytes} bytes"
    finally:
        path.write_bytes(good)


def weights(root: Path, step: int) -> float:
    return float(load_states(root, step, "actor")["model"]["w"][0])


def test_an_altered_manifest_is_passed_over_for_the_step_before(root: Path) -> None:
    for where in altered(step_folder(root, 3) / "manifest.json"):
        found = find_newest(root)
        assert found.step == 2 or found == require_committed(root, 3), where
    assert weights(root, find_newest(root).step) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_altered_iteration_file_moves_no_resume_and_is_repaired(root: Path, kind: str) -> None:
    for where in altered(root / ITERATION_FILES[kind]):
        assert find_newest(root, kind).step == 3, where
        with acquire_commit_lock(root):
            repair_latest_pointer(root, kind)
        assert read_latest_pointer(root, kind) == 3, where


@pytest.mark.parametrize("number", [1, 2])
def test_an_altered_run_record_lets_no_superseded_step_back(root: Path, number: int) -> None:
    for where in altered(root / f".trinity_sync/runs/{number}.json"):
        with pytest.raises((SupersededError, CommitError)):
            refuse_superseded(root, 1, "1", 4)
        assert find_newest(root).step == 3, where
        with suppress(CommitError):
            assert find_newest_run(root).number == 2, where
        with suppress(CommitError), acquire_commit_lock(root):
            repair_latest_pointer(root, "checkpoint")
        assert read_latest_pointer(root, "checkpoint") == 3, where


def test_an_altered_pin_tag_or_lease_still_keeps_its_step(root: Path) -> None:
    pin(root, 1, "the best")
    tag(root, 2, "good")
    with acquire_lease(root, 3, "reader") as lease:
        for path in (root / ".trinity_sync/pins").iterdir():
            for where in altered(path):
                with suppress(CommitError):  # a tag that is torn holds all of them up
                    assert {1, 2} <= set(list_steps_in_use(root)), where
        for where in altered(lease.path):
            assert set(list_steps_in_use(root)) == {1, 2, 3}, where


def test_an_altered_mark_of_damage_still_counts(root: Path) -> None:
    mark_corrupted(root, 3, Corruption({SHARD: "is missing"}, 1.7e9 + 0.5))
    for where in altered(step_folder(root, 3) / "corrupted.json"):
        assert find_newest(root).step == 2, where
        with pytest.raises(CommitError, match="step 3"):
            require_committed(root, 3)


def test_an_altered_receipt_is_not_taken_for_the_end_of_a_save(root: Path, job: Job) -> None:
    write_status(job.spool, FunctionStatus("f", 2, 4, "checkpoint", 0, "1/1", "failed", error="no"))
    for where in altered(next(job.spool.receipts.iterdir())):
        with suppress(TrinitySyncError):
            assert [each.state for each in read_statuses(job.spool, job.save(4, run=2))] != [
                "finished"
            ], where


def test_an_altered_catalog_answers_or_says_that_it_is_broken(root: Path, tmp_path: Path) -> None:
    database = tmp_path / "catalog.db"
    url = f"sqlite:///{database}"
    tag(root, 2, "good")
    with open_catalog(url) as engine:
        mirror(engine, root, [1, 2, 3])
    good, random = database.read_bytes(), Random(1)
    rows = [at for at in range(len(good)) if good[at]]
    for at in random.sample(rows, 150):
        byte = good[at] ^ 1 << random.randrange(8)
        database.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
        with suppress(CatalogError), open_catalog(url) as engine:
            list_jobs(engine)
            is_current(engine, root)
        assert find_newest(root).step == 3


@pytest.mark.parametrize(
    "alter",
    [
        "steps_1 SET nbytes = 'many'",
        "jobs_1 SET mirrored_at = 'once'",
        "jobs_1 SET root = NULL",
    ],
)
def test_a_value_of_the_catalog_that_is_none_of_ours_is_an_error_of_its_reader(
    root: Path, tmp_path: Path, alter: str
) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    with open_catalog(url) as engine:
        mirror(engine, root, [3])
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection:
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'root TEXT NOT NULL', 'root TEXT')"
        )
        connection.commit()
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as connection:
        assert connection.execute(f"UPDATE {alter}").rowcount
        connection.commit()
    with (
        pytest.raises(CatalogError, match=r"is corrupted: .* reconcile"),
        open_catalog(url) as engine,
    ):
        list_jobs(engine)
