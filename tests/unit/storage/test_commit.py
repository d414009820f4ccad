"""The commit protocol: a step is committed or it is not, whatever is missing, late or broken."""

import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import environment
from tests.support.disk import no_file_above, no_opens_of, noted_syncs
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from tests.support.steps import MODEL, save_foreign_step
from trinity_sync.errors import (
    EvictedError,
    ImageError,
    ManifestError,
    MissingShardsError,
    SaveError,
    SupersededError,
    TicketError,
)
from trinity_sync.fs.direct_io import RateLimit, digest_cached_file
from trinity_sync.fs.process import read_process_identity
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.on_node import commit_step
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.pipeline.save import export_requested_models
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import RootSteps, list_prunable_quarantine
from trinity_sync.retention.removal import describe_steps
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import end_images
from trinity_sync.snapshot import packed
from trinity_sync.snapshot.packed import pack
from trinity_sync.snapshot.ticket import failure_path, ticket_path
from trinity_sync.storage.commit import commit, free_committed_slots, remove_uncommitted
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    list_unnamed_files,
    mark_corrupted,
    read_latest_pointer,
    require_committed,
)
from trinity_sync.storage.gc import remove_replaced
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.manifest import read_manifest, read_run_head, write_manifest_into
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.runs import open_run, refuse_other_job, refuse_superseded
from trinity_sync.storage.save_functions import (
    FunctionStatus,
    await_save_functions,
    has_request,
    has_running_functions,
    read_statuses,
    remove_statuses,
    write_request,
    write_status,
)
from trinity_sync.storage.steps_in_use import pin, tag
from trinity_sync.storage.uncommitted import remove_files


def state(value: float, size: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((size,), value)}


def folder(job: Job, step: int) -> Path:
    return job.root / f"global_step_{step}"


def test_a_committed_step_names_every_file_with_size_and_digest(job: Job, tmp_path: Path) -> None:
    (tmp_path / "meta/huggingface").mkdir(parents=True)
    (tmp_path / "meta/huggingface/config.json").write_text("{}")
    (tmp_path / "meta/fsdp_config.json").write_text('{"world_size": 1}')
    states = {"model": state(1), "optim": state(2), "extra_state": {"rng": 3}}
    job.stage(7, states, metadata=tmp_path / "meta")
    manifest = job.commit(7, "model", "optim", "extra_state", "metadata")
    assert [file.path for file in manifest.files] == [
        "actor/model_world_size_1_rank_0.pt",
        "actor/optim_world_size_1_rank_0.pt",
        "actor/extra_state_world_size_1_rank_0.pt",
        "actor/fsdp_config.json",
        "actor/huggingface/config.json",
    ]
    assert read_manifest(job.root, 7) == require_committed(job.root, 7)
    for record in manifest.files:
        path = folder(job, 7) / record.path
        assert path.stat().st_size == record.nbytes
        assert digest_cached_file(path) == record.digest
    assert (folder(job, 7) / ".full_checkpoint").exists()
    assert (
        read_latest_pointer(job.root, "checkpoint")
        == read_latest_pointer(job.root, "state_dict")
        == 7
    )
    assert job.spool.tickets() == ([], [])  # the slots are free again
    assert not list(folder(job, 7).rglob("*.tmp"))


def test_an_image_leaves_the_memory_of_its_writer_while_it_is_written(
    job: Job, tmp_path: Path
) -> None:
    job.stage(1, {"extra_state": {"w": torch.ones(16 << 20)}})
    slot = str(job.spool.slot("actor", "extra_state", 0, 0))
    resident: list[int] = []

    def look() -> None:
        mappings = re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        (own,) = (each for each in mappings if slot in each and " r--s " in each)
        resident.append(int(own.split("Rss:")[1].split()[0]) << 10)

    # the digest, which reads the pages as well, is ahead of a slow write
    options = WriteOptions(limit=RateLimit(tmp_path / "rate", 100e6))
    with when_opened(folder(job, 1) / "actor", look):  # once the file is written
        persist(job.share, job.save(1), "extra_state", options)
    assert resident[0] < 32 << 20


def test_a_sync_and_a_checkpoint_write_the_model_once_and_a_retry_leaves_the_manifest_as_it_is(
    job: Job,
) -> None:
    """Policies go by the time of the commit."""
    job.stage(3, {"model": state(1)}, kind="state_dict")
    job.stage(3, {"optim": state(2)}, also=("model",))
    first = job.commit(3, kind="state_dict")
    assert not (folder(job, 3) / ".full_checkpoint").exists()
    model, manifest = folder(job, 3) / MODEL, folder(job, 3) / "manifest.json"
    inode = model.stat().st_ino
    both = job.commit(3, "model", "optim")
    assert model.stat().st_ino == inode
    assert (first.kinds, both.kinds) == (("state_dict",), ("checkpoint", "state_dict"))
    assert len(read_manifest(job.root, 3).files) == 2
    assert (folder(job, 3) / ".full_checkpoint").exists()
    before = manifest.read_bytes(), manifest.stat().st_ino
    (job.root / "latest_checkpointed_iteration.txt").unlink()  # the first attempt died before it
    again = job.commit(3, "model", "optim")
    job.commit(3, kind="state_dict")
    assert (manifest.read_bytes(), manifest.stat().st_ino) == before
    assert again.committed_at == both.committed_at
    assert read_latest_pointer(job.root, "checkpoint") == 3


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint"])
def test_what_is_submitted_again_with_other_values_is_refused(job: Job, kind: Kind) -> None:
    job.commit_states(3, {"model": state(1)}, kind=kind)
    job.stagers.pop(0).close()  # by a process that was started meanwhile
    job.stage(3, {"model": state(2)}, kind="checkpoint")
    with pytest.raises(SaveError, match=r"has committed actor/model\S+ .* with other content"):
        job.commit(3)
    assert torch.load(folder(job, 3) / MODEL)["w"][0] == 1
    assert [sealed.ticket.step for sealed in job.spool.tickets()[0]] == [3]  # it is not lost


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint"])
def test_a_component_that_is_submitted_after_the_commit_is_refused(job: Job, kind: Kind) -> None:
    committed = job.commit_states(3, {"model": state(1)}, kind=kind)
    job.stagers.pop(0).close()
    job.stage(3, {"model": state(1), "optim": state(1)}, kind=kind)
    with pytest.raises(SaveError, match=r"without actor/optim\S+ Submit .* in one call"):
        job.commit(3, "model", "optim", kind=kind)
    assert require_committed(job.root, 3) == committed


def test_images_of_two_submissions_are_not_committed_together(job: Job) -> None:
    written = []
    for value, component in ((1, "optim"), (2, "model")):
        job.stage(3, {"model": state(value), "optim": state(value)})
        written += job.persist(3, component)
        for sealed in job.spool.tickets()[0]:  # evicted
            ticket_path(sealed.slot).unlink()
        job.stagers.pop(0).close()
    with pytest.raises(MissingShardsError, match="mixes two submissions of rank 0"):
        commit(job.save(3), written)
    assert find_newest(job.root) is None


def test_an_image_that_comes_late_is_not_judged_by_a_manifest_that_cannot_be_read(job: Job) -> None:
    job.stage(3, {"model": state(1)}, export="hf_model")
    written = job.persist(3)
    commit(job.save(3), written)
    job.stagers.pop(0).close()
    job.stage(3, {"model": state(1)})
    with no_opens_of(job.root / "global_step_3/manifest.json"):
        with pytest.raises(BlockingIOError):
            free_committed_slots(job.spool, job.save(3), written)
        with pytest.raises(BlockingIOError):
            export_requested_models(job.request(3))
        assert read_run_head(job.root, 1, 3) is None
        assert find_pending_saves(job.spool, grace_s=0)
    assert [each.failed for each in job.spool.tickets()[0]] == [False]
    free_committed_slots(job.spool, job.save(3), written)
    assert job.spool.tickets() == ([], [])


@pytest.mark.parametrize("second", ["{}", "[]"], ids=["equal", "one differs"])
def test_images_that_come_late_join_the_commit_if_all_their_files_are_equal(
    job: Job, tmp_path: Path, second: str
) -> None:
    (metadata := tmp_path / "meta").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (metadata / name).write_text("{}")
    job.stage(3, {"model": state(1)}, metadata=metadata)
    committed = job.commit(3, "model", "metadata")
    job.stagers.pop(0).close()
    (metadata / "tokenizer.json").write_text(second)
    job.stage(3, {"model": state(1)}, metadata=metadata)
    images = {sealed.ticket.component: sealed.ticket.image for sealed in job.spool.tickets()[0]}
    free_committed_slots(job.spool, job.save(3), [])
    now, late = require_committed(job.root, 3), job.spool.tickets()[0]
    failed = ["metadata"] if second == "[]" else []
    assert [(each.ticket.component, each.failed) for each in late] == [(n, True) for n in failed]
    assert [name for name, image in images.items() if image not in now.images] == failed
    digests = [{file.path: file.digest for file in each.files} for each in (now, committed)]
    assert digests[0] == digests[1]


def test_of_attempts_at_a_time_one_commits_another_finds_it_and_the_rest_leave_nothing(
    job: Job,
) -> None:
    job.world_size = 2
    for rank in (0, 1):
        job.stage(3, {"model": state(rank)}, rank=rank)
    first, second, failed, _died = (job.persist(3) for _ in range(4))
    remove_files(Path(each.temporary) for each in failed)
    commit(job.save(3), first)
    commit(job.save(3), second)
    manifest = require_committed(job.root, 3)
    for record, file in zip(manifest.files, first, strict=True):
        assert (folder(job, 3) / record.path).stat().st_ino == file.identity[0]
    assert not list(folder(job, 3).rglob("*.tmp"))


def test_a_sync_that_is_retried_leaves_the_image_to_the_checkpoint(job: Job) -> None:
    for kind in ("state_dict", "checkpoint"):
        job.stage(3, {"model": state(1)}, kind=kind)  # in the same slot, since it is unchanged
        job.commit(3, kind="state_dict")
    assert [sealed.ticket.kind for sealed in job.spool.tickets()[0]] == ["checkpoint"]
    job.commit(3)
    assert require_committed(job.root, 3).kinds == ("checkpoint", "state_dict")
    assert job.spool.tickets() == ([], [])


def test_the_sync_of_a_role_is_not_taken_for_that_of_another(job: Job) -> None:
    for role, other in (("actor", "critic"), ("critic", "actor")):
        job.stage(2, {"model": state(2)}, kind="state_dict", role=role, roles=(role,))
        job.roles = (role,)
        (written,) = job.persist(2, kind="state_dict")
        assert written.temporary
        commit(job.save(2, kind="state_dict"), [written])
        step = require_committed(job.root, 2)
        committed = [step.has_kind("state_dict", [each]) for each in (role, other)]
        assert committed == [True, role == "critic"]
    assert require_committed(job.root, 2).roles == ("actor", "critic")


@pytest.mark.parametrize(
    ("roles", "world_sizes", "told"),
    [
        (("actor", "critic"), [1], "role critic"),
        (("actor",), [2], r"step 4 .*model of role actor rank 1"),
        (("actor",), [2, 3], r"mixes shards of world sizes \[2, 3\]"),
    ],
    ids=["a role is missing", "a rank is missing", "a rank is of another world size"],
)
def test_what_is_missing_is_named_and_nothing_is_committed(
    job: Job, roles: tuple[str, ...], world_sizes: list[int], told: str
) -> None:
    job.roles, job.world_size = roles, world_sizes[0]
    for rank, world_size in enumerate(world_sizes):
        states = {"model": state(1), "optim": state(1)}
        job.stage(4, states, rank=rank, world_size=world_size)
    with pytest.raises(MissingShardsError, match=told):
        job.commit(4, "model", "optim")
    assert read_manifest(job.root, 4) is None
    assert find_newest(job.root) is None
    assert read_latest_pointer(job.root, "checkpoint") is None


def test_a_truncated_image_is_named_with_step_role_and_rank(job: Job) -> None:
    job.stage(4, {"model": state(1)})
    os.truncate(job.spool.tickets()[0][0].slot, 100)
    with pytest.raises(ImageError, match=r"step 4, role actor, rank 0 .*truncated: 100 of"):
        job.commit(4)
    assert find_newest(job.root) is None


def test_a_corrupted_ticket_of_another_role_or_rank_is_not_blamed(job: Job) -> None:
    job.world_size, job.roles = 2, ("actor", "critic")
    for role in job.roles:
        job.stage(4, {"model": state(1)}, role=role)
    (critic,) = (s.slot for s in job.spool.tickets()[0] if s.ticket.role == "critic")
    ticket_path(critic).write_bytes(b"torn")
    save, options = job.save(4), WriteOptions(rank_timeout_s=0)
    of_actor = replace(job.share, ranks={"actor": (1,)})
    with pytest.raises(MissingShardsError, match=r"model of role actor rank 1"):
        persist(of_actor, save, "model", options)
    of_critic = replace(job.share, ranks={"critic": (0,)})
    with pytest.raises(TicketError, match="is torn") as caught:
        persist(of_critic, save, "model", options)
    error = pickle.loads(pickle.dumps(caught.value))  # it comes from another process
    assert (error.path, error.role, error.component, error.rank, error.step) == (
        *(ticket_path(critic), "critic", "model", 0, None),
    )


def test_an_evicted_image_is_never_saved_as_another_step(job: Job) -> None:
    job.stage(1, {"model": state(1)})
    sealed = job.spool.tickets()[0][0]
    job.commit(1)
    for step in (2, 3):
        job.stage(step, {"model": state(step)})
    from trinity_sync.storage.persist import _lock_content

    with pytest.raises(EvictedError, match="was evicted for a later step") as caught:
        _lock_content(job.save(1), sealed).__enter__()
    assert caught.value.__cause__ is None  # an I/O error would be repeated
    sealed.slot.unlink()  # with its folder, as other programs do
    with pytest.raises(ImageError, match="is missing in the spool"):
        _lock_content(job.save(1), sealed).__enter__()


def test_an_image_is_marked_as_failed_with_its_whole_reason_or_with_none_until_its_save_is_retried(
    job: Job,
) -> None:
    job.stage(1, {"model": state(1)})
    (image,) = job.spool.tickets()[0]
    with no_file_above(4):
        end_images(job.spool, job.request(1), "the disk was full")
    assert image.failed
    assert failure_path(image.slot).read_text() == ""
    job.persist(1)
    assert not image.failed


@pytest.mark.skipif(os.getuid() != 0, reason="needs a mount of its own")
def test_a_save_that_fails_for_one_rank_leaves_no_file_of_the_others(
    job: Job, small_disk: Path
) -> None:
    job.root, job.world_size = small_disk, 2
    for rank in (0, 1):
        job.stage(10, {"model": state(rank, size=5000 + rank * (2 << 20))}, rank=rank)
    with pytest.raises(SaveError, match=r"cannot write model .* rank [01] .*: No space left"):
        job.persist(10)
    assert not list((folder(job, 10) / "actor").iterdir())
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    job.commit(10)
    require_committed(job.root, 10)


def test_an_attempt_that_finds_its_images_committed_by_another_says_nothing_of_an_eviction(
    job: Job,
) -> None:
    job.stage(3, {"model": state(3)})
    first = job.persist(3)
    calls = 0

    def commit_meanwhile() -> float:  # between the look at the spool and the locks of the images
        nonlocal calls
        calls += 1
        if calls == 2:
            commit(job.save(3), first)
            free_committed_slots(job.spool, job.save(3), first)
        return 0.0

    (again,) = persist(job.share, job.save(3), "model", WriteOptions(), clock=commit_meanwhile)
    assert (again.temporary, again.record) == ("", read_manifest(job.root, 3).files[0])
    assert calls > 2


def test_a_retry_of_a_save_that_was_committed_and_removed_says_so_at_once(job: Job) -> None:
    for step in (3, 4):
        job.commit_states(step, {"model": state(step)})
    shutil.rmtree(folder(job, 3))
    waited = iter([0.0, 0.0])  # no third look at the clock, so it has not waited
    with pytest.raises(SaveError, match=r"step 3 .* was committed at \d.* has been removed"):
        persist(job.share, job.save(3), "model", WriteOptions(), clock=lambda: next(waited))


def test_a_save_function_whose_process_died_has_failed(job: Job) -> None:
    died, lives = "1/1", read_process_identity(os.getpid())
    for name, process in (("lora", died), ("model", lives)):
        write_status(job.spool, FunctionStatus(name, 1, 3, "checkpoint", 0, process))
    found = {each.name: each.state for each in read_statuses(job.spool, job.save(3))}
    assert found == {"lora": "failed", "model": "started"}
    with pytest.raises(SaveError, match="'lora' of rank 0 failed: the process died"):
        await_save_functions(job.spool, job.save(3))


@pytest.mark.parametrize("there", ["the run", "none", "another one"])
def test_a_save_is_refused_where_a_restored_root_has_no_run_or_another_one_of_its_number(
    job: Job, there: str
) -> None:
    open_run(job.root, "lost", 0)
    save = job.save(4)
    if there != "the run":  # the backup is of before it
        (job.root / ".trinity_sync/runs/1.json").unlink()
    if there == "another one":
        open_run(job.root, "of the backup", 0)
    for refuse in (
        lambda: refuse_other_job(save),
        lambda: refuse_superseded(save.root, save.run, save.run_key, save.step),
    ):
        refused = pytest.raises(SupersededError, match=r"run 1 .* restored from a backup")
        with refused if there != "the run" else nullcontext():
            refuse()


def test_a_save_function_of_a_lost_run_of_the_same_number_is_none_of_the_save(job: Job) -> None:
    lost = FunctionStatus("lora", 1, 3, "checkpoint", 0, "1/1", "failed", run_key="lost")
    write_status(job.spool, lost)
    save = replace(job.save(3), run_key="first")
    assert not await_save_functions(job.spool, save)
    with pytest.raises(SaveError, match="'lora' of rank 0 failed"):
        await_save_functions(job.spool, of_lost := replace(save, run_key="lost"))
    process = read_process_identity(os.getpid())
    write_status(job.spool, replace(lost, state="started", process=process))
    for within_s in (0, 600):  # also what has just ended is another run's
        saves = (save, of_lost)
        running = [has_running_functions(job.spool, each, within_s=within_s) for each in saves]
        assert running == [False, True]
    write_request(job.spool, of_lost, "{}")
    remove_statuses(job.spool, save)
    assert [*read_statuses(job.spool, of_lost)]
    assert has_request(job.spool, of_lost)
    remove_statuses(job.spool, of_lost)
    assert not [*job.spool.receipts.iterdir()]


def test_a_function_that_has_ended_before_a_clock_was_set_back_does_not_run(job: Job) -> None:
    status = FunctionStatus("lora", 1, 4, "checkpoint", 0, "1/1", state="finished")
    write_status(job.spool, replace(status, run_key=job.key_of(1)))
    (path,) = job.spool.receipts.iterdir()
    now = path.stat().st_mtime
    for ended_at, runs in ((now, True), (now - 7200, False), (now + 7200, False)):
        os.utime(path, times=(ended_at, ended_at))
        assert has_running_functions(job.spool, job.save(4), within_s=600) == runs


def test_a_retry_of_save_functions_whose_step_was_committed_and_removed_says_so(
    job: Job, tmp_path: Path
) -> None:
    write_job_settings(job.root, {"rank_timeout_s": 0.1})
    folder(job, 3).mkdir()
    (folder(job, 3) / "lora.bin").write_bytes(b"adapter")
    status = FunctionStatus("lora", 1, 3, "checkpoint", 0, "1/1", "finished", files=("lora.bin",))
    commit(job.save(3), [], [status])
    shutil.rmtree(folder(job, 3))
    request = SaveRequest(**vars(job.save(3)), components=(), expected=1)
    with (
        environment({"TRINITY_SYNC_HOME": str(tmp_path)}),
        pytest.raises(SaveError, match="has been removed"),
    ):
        commit_step(request, [], job.share, 0.0, 0.0)


@pytest.mark.parametrize("runs", [[2], [1, 2]], ids=["new", "replaces another"])
def test_equal_files_of_a_step_are_one_file(job: Job, runs: list[int]) -> None:
    job.world_size = 3
    for run in runs:
        for rank, value in enumerate((run, 3, 3)):
            job.stage(4, {"model": state(value, 1 << 18)}, rank=rank, run=run)
        job.commit(4, run=run)
    step = folder(job, 4)
    files = [(step / f"actor/model_world_size_3_rank_{rank}.pt").stat() for rank in range(3)]
    assert files[1].st_ino == files[2].st_ino != files[0].st_ino
    require_committed(job.root, 4)
    assert [path.name for path in step.rglob(".*")] == [".full_checkpoint"]


def test_a_file_that_was_swapped_before_the_commit_is_not_committed(job: Job) -> None:
    job.stage(4, {"model": state(1)})
    written = job.persist(4)
    final = folder(job, 4) / written[0].record.path
    Path(written[0].temporary).unlink()
    final.write_bytes(b"x" * written[0].record.nbytes)
    with pytest.raises(SaveError, match="changed before its commit"):
        commit(job.save(4), written)
    assert find_newest(job.root) is None


@pytest.mark.parametrize("torn", ["", "4", "\x00\x00", "4x", "-1"])
def test_an_empty_or_torn_latest_pointer_is_repaired_by_the_next_commit(
    job: Job, torn: str
) -> None:
    job.commit_states(4, {"model": state(1)})
    (job.root / "latest_checkpointed_iteration.txt").write_text(torn)
    assert find_newest(job.root).step == 4
    job.commit_states(5, {"model": state(1)})
    assert read_latest_pointer(job.root, "checkpoint") == 5


@pytest.mark.parametrize("left", ["a torn manifest", "the mark of a corrupted step"])
def test_what_is_left_of_a_step_does_not_count_and_can_be_committed_over(
    job: Job, left: str
) -> None:
    for step in (4, 5):
        job.commit_states(step, {"model": state(step)})
    path = folder(job, 5) / "manifest.json"
    if left == "a torn manifest":
        path.write_text(path.read_text()[:100])
        with pytest.raises(ManifestError, match="torn"):
            read_manifest(job.root, 5)
    else:
        mark_corrupted(job.root, 5, Corruption({"actor": "was"}, 1.0))
        path.unlink()
    assert find_newest(job.root).step == 4
    job.commit_states(5, {"model": state(5)})
    assert find_newest(job.root).step == 5


def test_a_failure_after_the_commit_removes_no_file_of_it(job: Job) -> None:
    job.stage(3, {"model": state(3)})
    written = job.persist(3)
    commit(job.save(3), written)
    remove_uncommitted(job.save(3), written)
    require_committed(job.root, 3)
    (folder(job, 3) / "manifest.json").unlink()  # it has failed before
    remove_uncommitted(job.save(3), written)
    assert not (folder(job, 3) / written[0].record.path).exists()


def test_every_folder_above_a_committed_file_is_durable_before_the_manifest(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, earlier = folder(job, 1) / "actor/adapters/lora", set[int]()
    deep.mkdir(parents=True)
    (deep / "adapter.safetensors").write_bytes(b"weights")
    job.stage(1, {"model": state(0)})
    written, files = job.persist(1), ("actor/adapters/lora/adapter.safetensors",)
    receipt = FunctionStatus("lora", 1, 1, "checkpoint", 0, "1/1", state="finished", files=files)
    with noted_syncs() as durable:

        def write(*of_step: Any) -> None:
            earlier.update(durable)
            write_manifest_into(*of_step)

        monkeypatch.setattr("trinity_sync.storage.commit.write_manifest_into", write)
        commit(job.save(1), written, [receipt])
    assert {each.stat().st_ino for each in (deep, *deep.parents[:4])} <= earlier


def checkpoints_of_a_run(job: Job, *steps: int) -> None:
    open_run(job.root, "first", 0)
    for step in steps:
        job.commit_states(step, {"model": state(step), "optim": state(-step)})


def test_a_sync_of_the_step_that_a_run_has_loaded_takes_its_checkpoint_over(job: Job) -> None:
    checkpoints_of_a_run(job, 30, 40)
    write_metrics(job.root, 1, 40, {"reward": 3.0})
    open_run(job.root, "second", 40)
    job.commit_states(40, {"model": state(40)}, run=2, kind="state_dict")
    found = find_newest(job.root)
    assert (found.step, found.run, len(found.files)) == (40, 2, 2)
    assert torch.load(folder(job, 40) / MODEL.replace("model", "optim"))["w"][0] == -40
    assert find_newest(job.root, "state_dict") == found
    assert [read_latest_pointer(job.root, kind) for kind in KINDS] == [40, 40]
    assert job.spool.tickets() == ([], [])
    assert [found.has_kind(kind) for kind in ("state_dict", "checkpoint")] == [True, False]
    assert [each.metrics for each in describe_steps(RootSteps(job.root))] == [{}, {"reward": 3.0}]
    job.commit(40, run=2, kind="state_dict")  # a retry
    assert find_newest(job.root) == found
    job.commit_states(40, {"model": state(41), "optim": state(41)}, run=3)
    assert [each.metrics for each in describe_steps(RootSteps(job.root))] == [{}, {}]  # replaced


@pytest.mark.parametrize("resumed_from", [40, 30, 0])
def test_a_sync_never_takes_the_newest_checkpoint_away(job: Job, resumed_from: int) -> None:
    checkpoints_of_a_run(job, 30, 40)
    open_run(job.root, "second", resumed_from)
    job.stage(40, {"model": state(-1)}, run=2, kind="state_dict")
    with pytest.raises(SaveError, match=r"would replace the newest checkpoint, of run 1.*rewind"):
        job.commit(40, run=2, kind="state_dict")
    assert (find_newest(job.root).step, find_newest(job.root).run) == (40, 1)
    assert [read_latest_pointer(job.root, kind) for kind in KINDS] == [40, 40]
    assert torch.load(folder(job, 40) / MODEL)["w"][0] == 40
    job.commit_states(
        40, {"model": state(-1), "optim": state(-1)}, run=2
    )  # a whole checkpoint replaces it
    assert (find_newest(job.root).step, find_newest(job.root).run) == (40, 2)


@pytest.mark.parametrize("claim", [pin, partial(tag, name="best")])
def test_a_sync_never_takes_a_pinned_checkpoint_away(job: Job, claim: Callable[..., Any]) -> None:
    checkpoints_of_a_run(job, 30, 40, 50)
    claim(job.root, 40)
    open_run(job.root, "second", 30)
    job.stage(40, {"model": state(-1)}, run=2, kind="state_dict")
    with pytest.raises(SaveError, match="of run 1, which is pinned or tagged"):
        job.commit(40, run=2, kind="state_dict")
    assert require_committed(job.root, 40).run == 1


def test_a_sync_does_not_take_over_a_checkpoint_that_is_corrupted(job: Job) -> None:
    checkpoints_of_a_run(job, 30, 40)
    os.truncate(folder(job, 40) / MODEL.replace("model", "optim"), 10)
    open_run(job.root, "second", 30)
    job.commit_states(40, {"model": state(40)}, run=2, kind="state_dict")
    assert find_newest(job.root).step == 30
    assert find_newest(job.root, "state_dict").step == 40


def test_a_checkpoint_without_a_model_serves_no_sync(job: Job) -> None:
    job.commit_states(10, {"model": state(10)})
    job.stage(20, {"optim": state(20)})
    assert job.commit(20, "optim").kinds == ("checkpoint",)
    assert read_latest_pointer(job.root, "checkpoint") == find_newest(job.root).step == 20
    assert (
        read_latest_pointer(job.root, "state_dict")
        == find_newest(job.root, "state_dict").step
        == 10
    )
    job.commit_states(20, {"model": state(20)}, kind="state_dict")
    assert find_newest(job.root, "state_dict").step == 20


def test_a_checkpoint_without_a_model_does_not_take_the_newest_weights_away(job: Job) -> None:
    checkpoints_of_a_run(job, 10)
    open_run(job.root, "second", 10)
    job.stage(10, {"optim": state(1)}, run=2)
    with pytest.raises(SaveError, match="would replace the newest state_dict"):
        job.commit(10, "optim", run=2)
    require_committed(job.root, 10)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_pointer_stays_at_a_newer_step_that_another_system_has_saved(
    job: Job, resumed: bool
) -> None:
    open_run(job.root, "first", 0)
    (job.root / "global_step_50/actor").mkdir(parents=True)  # by veRL itself
    (job.root / "global_step_50" / MODEL).touch()
    pointer = job.root / "latest_checkpointed_iteration.txt"
    pointer.write_text("50")
    if resumed:  # from an older step, on purpose and later
        open_run(job.root, "second", 30)
    began = (job.root / f".trinity_sync/runs/{1 + resumed}.json").stat().st_mtime
    os.utime(pointer, times=(began, began + (-1 if resumed else 1)))
    job.commit_states(40, {"model": state(40)}, run=2 if resumed else 1)
    assert read_latest_pointer(job.root, "checkpoint") == (40 if resumed else 50)
    assert read_latest_pointer(job.root, "state_dict") == 40


def test_a_resumed_run_replaces_the_steps_that_it_reaches_again(job: Job) -> None:
    open_run(job.root, "first", 0)
    for step in (10, 11, 12):
        job.commit_states(step, {"model": state(step)})
    (folder(job, 11) / "data.pt").write_text("by other code, next to the first run's step")
    (folder(job, 11) / f".nfs{'0' * 24}").write_text("removed, and still open on NFS")
    open_run(job.root, "second", 10)
    job.stage(11, {"model": state(-11)}, run=2)
    before = folder(job, 11).stat().st_ino
    job.commit(11, run=2)
    assert folder(job, 11).stat().st_ino != before  # exchanged as a whole
    assert read_latest_pointer(job.root, "checkpoint") == 11
    assert find_newest(job.root).step == 11
    again = torch.load(folder(job, 11) / "actor/model_world_size_1_rank_0.pt")
    assert torch.equal(again["w"], state(-11)["w"])
    assert not (folder(job, 11) / "data.pt").exists()
    assert not list(folder(job, 11).glob(".nfs*"))
    require_committed(job.root, 11)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_checkpoint_is_committed_that_was_written_when_the_sync_of_its_step_replaced_the_folder(
    job: Job, resumed: bool
) -> None:
    open_run(job.root, "first", 0)
    job.commit_states(10, {"model": state(10)})
    job.commit_states(11, {"model": state(11)}, kind="state_dict")
    open_run(job.root, "second", 10 * resumed, resumed_run=int(resumed))
    job.stage(11, {"model": state(-11)}, run=2, kind="state_dict")
    job.stage(11, {"optim": state(2)}, run=2, also=("model",))
    sync = job.persist(11, run=2, kind="state_dict")
    checkpoint = job.persist(11, "optim", run=2)
    (folder(job, 11) / "critic").mkdir()
    unfinished = folder(job, 11) / f"critic/.optim.pt.attempt.{'ab' * 16}.tmp"  # of another role
    with unfinished.open("wb") as file:
        assert commit(job.save(11, run=2, kind="state_dict"), sync).run == 2
        assert unfinished.stat().st_ino == os.fstat(file.fileno()).st_ino
    commit(job.save(11, run=2), [*job.persist(11, run=2), *checkpoint])
    assert {*require_committed(job.root, 11).kinds} == {"checkpoint", "state_dict"}
    for name, value in (("model", -11), ("optim", 2)):
        again = torch.load(folder(job, 11) / f"actor/{name}_world_size_1_rank_0.pt")
        assert torch.equal(again["w"], state(value)["w"])


def test_steps_that_runs_of_one_second_replace_are_all_kept(job: Job) -> None:
    """Also files of other code whose names look like temporary ones."""
    for run in (1, 2, 3, 4):
        open_run(job.root, str(run), 0)
        os.utime(job.root / f".trinity_sync/runs/{run}.json", (1.7e9, 1.7e9))
        job.commit_states(10, {"model": state(run)}, run=run)
        for name in (".notes.tmp", ".a.b.c.tmp"):
            (folder(job, 10) / name).write_text(str(run))
    kept = [*(job.root / ".trinity_sync/quarantine").glob("*/global_step_10")]
    for name in (".notes.tmp", ".a.b.c.tmp"):
        assert sorted((each / name).read_text() for each in kept) == ["1", "2", "3"]
    assert len(list_prunable_quarantine(job.root, parse_policy("newer=1s"), now=4e9)) == 3


def test_a_commit_that_finds_a_link_in_the_place_of_a_file_is_refused(
    job: Job, tmp_path: Path
) -> None:
    open_run(job.root, "first", 0)
    job.commit_states(4, {"model": state(4)}, kind="state_dict")
    path = folder(job, 4) / MODEL
    path.symlink_to(path.rename(tmp_path / "moved"))
    job.stage(4, {"optim": state(1)}, also=("model",))
    with pytest.raises(SaveError, match=rf"{path} changed before its commit"):
        job.commit(4, "model", "optim")
    assert read_manifest(job.root, 4).kinds == ("state_dict",)


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("name", ["", "best"])
def test_a_pinned_step_that_a_later_run_replaces_stays_in_quarantine(
    job: Job, caplog: pytest.LogCaptureFixture, resumed: bool, name: str
) -> None:
    open_run(job.root, "first", 0)
    for step in (30, 40):
        job.commit_states(step, {"model": state(step)})
    tag(job.root, 40, name) if name else pin(job.root, 40, "paper, table 2")
    open_run(job.root, "second", 30 * resumed, resumed_run=int(resumed))
    job.commit_states(40, {"model": state(-40)}, run=2)
    replaced = job.root / ".trinity_sync/quarantine/pinned-of-run-1/global_step_40"
    assert str(replaced) in caplog.text
    assert list_prunable_quarantine(job.root, parse_policy("newer=1s"), now=4e9) == []
    for run, value in ((2, -40), (1, 40)):
        assert require_committed(job.root, 40).run == run
        again = torch.load(folder(job, 40) / "actor/model_world_size_1_rank_0.pt")
        assert torch.equal(again["w"], state(value)["w"])
        if run == 2:
            folder(job, 40).rename(job.root / "by the second run")
            replaced.rename(folder(job, 40))  # as if by hand, to have it back


def test_a_step_of_another_system_is_quarantined_and_not_mixed_with_the_one_that_replaces_it(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if that is interrupted, and finished later."""
    content = save_foreign_step(job.root, 40)
    open_run(job.root, "first", 0)
    (folder(job, 40) / "data.pt").write_bytes(b"by veRL's driver, for the step that is saved")
    (folder(job, 40) / "critic").mkdir()
    (folder(job, 40) / "critic" / Path(MODEL).name).write_bytes(b"by veRL's critic")
    manifest = job.commit_states(40, {"model": state(-40)})
    require_committed(job.root, 40)
    (aside,) = (job.root / ".trinity_sync/quarantine").glob("*/global_step_40")
    assert str(aside) in caplog.text
    del content["data.pt"]
    assert {name: (aside / name).read_bytes() for name in content} == content
    assert list_unnamed_files(job.root, manifest) == [f"critic/{Path(MODEL).name}", "data.pt"]
    assert (folder(job, 40) / "data.pt").read_bytes().endswith(b"that is saved")
    assert not list(job.root.rglob(".*.tmp"))
    aside.rename(job.root / ".trinity_sync/replacing/global_step_40")  # as the exchange leaves it
    assert [found.state for found in remove_replaced(job.root)] == ["repaired"]
    assert {name: (aside / name).read_bytes() for name in content} == content


def test_weights_alone_do_not_replace_the_checkpoint_of_another_system(job: Job) -> None:
    content = save_foreign_step(job.root, 40)
    open_run(job.root, "first", 40)
    job.stage(40, {"model": state(-40)}, kind="state_dict")
    with pytest.raises(SaveError, match="would replace the checkpoint of another system"):
        job.commit(40, kind="state_dict")
    assert {name: (folder(job, 40) / name).read_bytes() for name in content} == content


def test_paths_in_metadata_cannot_leave_the_steps_folder(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "require_names", lambda _: None)  # another program made the image
    evil = pack({"../../outside": b""})
    job.stager().stage(job.origin(1), {"model": state(1)}, metadata=evil)
    with pytest.raises(ImageError, match="outside"):
        persist(job.share, job.save(1), "metadata", WriteOptions(rank_timeout_s=0.05))


def test_a_run_of_functions_alone_that_is_retried_after_its_commit_commits_the_same_again(
    job: Job,
) -> None:
    (folder(job, 4) / "actor").mkdir(parents=True)
    (folder(job, 4) / "actor/dist_ckpt.bin").write_bytes(b"megatron")
    receipt = FunctionStatus(
        "dist", 1, 4, "checkpoint", 0, "1/1", "finished", files=("actor/dist_ckpt.bin",)
    )
    first = commit(job.save(4), [], [receipt])
    commit(job.save(4), [])  # by now the receipts are forgotten
    again = require_committed(job.root, 4)
    assert (again.files, again.callables) == (first.files, first.callables)
    with pytest.raises(MissingShardsError, match="nothing was submitted"):
        commit(job.save(5), [])


def test_shards_that_a_function_saw_appear_are_listed_once(job: Job) -> None:
    job.stage(3, {"model": state(1)}, kind="state_dict")
    job.stage(3, {"optim": state(2)}, also=("model",))
    job.commit(3, kind="state_dict")
    shard = "actor/model_world_size_1_rank_0.pt"
    receipt = FunctionStatus("hf_model", 1, 3, "checkpoint", 0, "1/1", "finished", files=(shard,))
    manifest = commit(job.save(3), job.persist(3, "model", "optim"), [receipt])
    assert [file.path for file in manifest.files].count(shard) == 1
    assert read_manifest(job.root, 3).find_file(shard).component == "model"
