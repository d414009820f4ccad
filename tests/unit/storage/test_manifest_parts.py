"""A manifest of many files is in parts: a reader of all reads all parts, a rank its own.

Power cuts are in `test_power_cuts`.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from trinity_sync.client.savers import CallableSaver
from trinity_sync.errors import ManifestError, SaveError
from trinity_sync.fs.process import read_process_identity
from trinity_sync.layout import step_folder
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import replicate
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import PendingSave
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage import manifest as manifest_files
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.manifest import Manifest, encode_manifest, read_manifest, write_manifest
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import CallableStatus, read_statuses

RANKS = 4


@pytest.fixture
def many(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of four ranks, with two files in each part of a manifest."""
    monkeypatch.setattr(manifest_files, "PART_FILES", 2)
    job.world_size = RANKS
    open_run(job.root, "first", 0)
    return job


def stage(job: Job, step: int, component: str = "model", value: float = 0.0, **other: Any) -> None:
    for rank in range(RANKS):
        job.stage(step, {component: {"w": torch.full((3,), rank + value)}}, rank=rank, **other)


def list_parts(root: Path, step: int) -> list[Path]:
    return sorted(step_folder(root, step).glob("manifest-*.json"))


def paths_of(manifest: Manifest | None) -> list[str]:
    assert manifest
    return [record.path for record in manifest.files]


def test_a_rank_reads_its_own_part_and_knows_the_whole_step(many: Job) -> None:
    stage(many, 1)
    committed = many.commit(1)
    whole, mine = read_manifest(many.root, 1), read_manifest(many.root, 1, ranks={3})
    head = read_manifest(many.root, 1, ranks=())
    assert whole
    assert paths_of(whole) == sorted(paths_of(committed))
    assert whole.parts == ()
    assert paths_of(mine) == [f"actor/model_world_size_4_rank_{rank}.pt" for rank in (2, 3)]
    assert paths_of(head) == []
    for each in (mine, head):
        assert each
        assert (each.roles, each.nbytes, each.kinds) == (("actor",), whole.nbytes, whole.kinds)
    assert len(list_parts(many.root, 1)) == 2


def test_few_files_need_no_part(job: Job) -> None:
    job.commit_states(1, {"model": {"w": torch.zeros(3)}})
    assert list_parts(job.root, 1) == []
    assert paths_of(read_manifest(job.root, 1, ranks=())) == ["actor/model_world_size_1_rank_0.pt"]


def test_a_rank_waits_until_its_own_images_are_committed(many: Job) -> None:
    request = SaveRequest(root=str(many.root), run=1, step=1)
    staged = [
        many.stage(1, {"model": {"w": torch.full((3,), float(rank))}}, rank=rank)
        for rank in range(RANKS)
    ]
    waiting = [
        PendingSave(request, 0.0, 0.0, 0.0, rank, images={*map(str, each.images)})
        for rank, each in enumerate(staged)
    ]
    assert [each.find_result(None, many.spool) for each in waiting] == [None] * RANKS
    many.commit(1)
    results = [each.find_result(None, many.spool) for each in waiting]
    assert results == [""] * RANKS


def test_a_part_that_is_altered_or_missing_uncommits_its_step(many: Job) -> None:
    for step in (1, 2):
        stage(many, step)
        many.commit(step)
    for part in list_parts(many.root, 2):
        content = part.read_bytes()
        for at in range(0, len(content), 37):
            part.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ManifestError, match="differs from its digest"):
                read_manifest(many.root, 2)
        part.unlink()
        with pytest.raises(ManifestError, match="lacks its part"):
            read_manifest(many.root, 2)
        assert find_newest(many.root).step == 1
        part.write_bytes(content)
    assert find_newest(many.root).step == 2


def test_a_reader_of_a_manifest_that_is_replaced_finds_the_new_one(many: Job) -> None:
    stage(many, 1, kind="state_dict")
    many.commit(1, kind="state_dict")
    stage(many, 1, "optim", also=("model",))
    before = list_parts(many.root, 1)
    with when_opened(before[-1], lambda: many.commit(1, "model", "optim")):
        found = read_manifest(many.root, 1)
    assert len(paths_of(found)) == 2 * RANKS
    assert not {*before} & {*list_parts(many.root, 1)}


def test_what_a_rank_has_read_is_never_written_as_the_whole(many: Job) -> None:
    stage(many, 1)
    many.commit(1)
    mine = read_manifest(many.root, 1, ranks={0})
    assert mine
    with pytest.raises(AssertionError, match="of other ranks would be lost"):
        write_manifest(many.root, mine)
    assert len(paths_of(read_manifest(many.root, 1))) == RANKS


def test_a_function_that_runs_while_its_step_is_committed_in_parts_lists_its_own_files_alone(
    many: Job,
) -> None:
    """A name of trinity_sync counts at the top of the step's folder only."""
    stage(many, 1, kind="state_dict")
    stage(many, 1, "optim", also=("model",))
    own = step_folder(many.root, 1) / "actor/lora"

    def write() -> None:
        many.commit(1, kind="state_dict")
        own.mkdir(parents=True)
        for name in ("adapter.bin", "manifest.json"):
            (own / name).write_bytes(b"lora")

    begun = CallableStatus("lora", 1, 1, "checkpoint", 0, read_process_identity(os.getpid()))
    CallableSaver(many.root, many.spool).call(write, begun)
    (status,) = read_statuses(many.spool, 1, 1, "checkpoint")
    commit(many.save(1), many.persist(1, "model", "optim"), [status])
    manifest = require_committed(many.root, 1)
    assert manifest.kinds == ("checkpoint", "state_dict")
    assert [path for path in paths_of(manifest) if not path.endswith(".pt")] == [
        "actor/lora/adapter.bin",
        "actor/lora/manifest.json",
    ]


def test_a_commit_names_no_file_of_trinity_sync_and_none_that_is_gone(many: Job) -> None:
    stage(many, 1, kind="state_dict")
    own, aside = step_folder(many.root, 1) / "own.bin", many.root / "aside"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"lora")
    status = CallableStatus("f", 1, 1, "state_dict", 0, "1/1", "finished", files=(own.name,))
    before = commit(many.save(1, kind="state_dict"), many.persist(1, kind="state_dict"), [status])
    stage(many, 1, "optim", also=("model",))
    written = many.persist(1, "model", "optim")
    part = list_parts(many.root, 1)[0].name
    with pytest.raises(SaveError, match=f"lists .*{part}, a name that trinity_sync uses"):
        commit(many.save(1), written, [replace(status, files=(part,))])
    own.rename(aside)
    with pytest.raises(SaveError, match=r"own.bin is missing"):
        commit(many.save(1), written)
    assert paths_of(read_manifest(many.root, 1)) == sorted(paths_of(before))
    aside.rename(own)
    commit(many.save(1), written)
    assert len(paths_of(require_committed(many.root, 1))) == 2 * RANKS + 1


def test_a_remote_has_one_manifest_and_a_copy_has_the_same_parts(many: Job, tmp_path: Path) -> None:
    stage(many, 1)
    many.commit(1)
    manifest = require_committed(many.root, 1)
    url = f"file://{tmp_path}/far"
    replicate(many.root, url, 1)
    assert Remote(url).read_file(1, "manifest.json") == encode_manifest(manifest)
    assert replicate(many.root, url, 1).uploaded == 0
    fetch(url, 1, tmp_path / "copy")
    assert read_manifest(tmp_path / "copy", 1) == manifest
    assert [each.name for each in list_parts(tmp_path / "copy", 1)] == [
        each.name for each in list_parts(many.root, 1)
    ]


def sync_and_save(job: Job) -> Callable[[], object]:
    """A checkpoint that merges with the sync of its step."""
    stage(job, 1, kind="state_dict")
    job.commit(1, kind="state_dict")
    stage(job, 1, "optim", also=("model",))
    written = job.persist(1, "model", "optim")
    return lambda: commit(job.save(1), written)


def replace_by_another_run(job: Job) -> Callable[[], object]:
    stage(job, 1)
    job.commit(1)
    open_run(job.root, "second", 0)
    stage(job, 1, value=0.5, run=2)
    written = job.persist(1, run=2)
    return lambda: commit(job.save(1, run=2), written)


@pytest.mark.parametrize("prepare", [sync_and_save, replace_by_another_run])
def test_a_commit_that_dies_before_any_change_of_a_name_is_done_or_not(
    many: Job, spool_folder: Path, tmp_path: Path, prepare: Callable[[Job], Callable[[], object]]
) -> None:
    """And the next attempt commits it, and leaves no other parts."""
    outcomes = []
    for die_before in itertools.count(1):
        root = tmp_path / f"dies-before-{die_before}"
        root.mkdir()
        job = Job(root, open_job_spool(spool_folder, root), RANKS)
        open_run(root, "first", 0)
        work = prepare(job)
        before = require_committed(root, 1)
        died = in_a_process(work, tmp_path, die_before=die_before) == die_before
        now = require_committed(root, 1)
        outcomes.append(now != before)
        work()
        after = require_committed(root, 1)
        if outcomes[-1]:
            assert paths_of(now) == paths_of(after)
        head = read_manifest(root, 1, ranks=())
        assert head
        assert [each.name for each in list_parts(root, 1)] == sorted(p.name for p in head.parts)
        for rank in range(RANKS):
            states = load_states(root, 1, "actor", rank=rank, world_size=RANKS)
            assert states["model"]["w"].tolist() == [rank + (after.run - 1) / 2] * 3
        for stager in job.stagers.values():
            stager.close()
        if not died:
            break
    assert outcomes == sorted(outcomes)
    assert len(outcomes) - sum(outcomes) > len(head.parts)
    assert sum(outcomes) > 1
