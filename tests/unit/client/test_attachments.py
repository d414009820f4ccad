"""What is attached to a step is committed with it, or not at all."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold
from tests.support.job import Job
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from trinity_sync.client.attachments import LIMIT
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    ImageError,
    MissingShardsError,
    SaveFailedError,
)
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_states

MODEL = {"model": {"w": torch.ones(9)}}


def test_bytes_and_files_are_committed_with_their_step(
    saves: Saves, job: Job, tmp_path: Path
) -> None:
    (tmp_path / "buffer").write_bytes(b"\0" * 5000)
    saves.attach("dataloader.json", b"[1]", step=4)
    saves.attach("dataloader.json", b"[2]", step=4)
    saves.attach("replay", tmp_path / "buffer", step=4)
    (tmp_path / "buffer").write_bytes(b"later")
    saves.attach("x" * 200, b"", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert saves.attachment(4, "dataloader.json") == b"[2]"
    assert saves.attachment(4, "x" * 200) == b""
    assert saves.attachment(4, "replay") == b"\0" * 5000
    assert (job.root / "global_step_4/attachments/replay").stat().st_size == 5000
    assert "attachments" in {record.component for record in read_manifest(job.root, 4).files}
    assert set(load_states(job.root, 4, "actor")) == {"model"}


def test_a_large_attachment_is_refused_with_what_to_do(
    coordinator_of: Open, tmp_path: Path
) -> None:
    with (tmp_path / "moments.pt").open("wb") as file:
        file.truncate(LIMIT + 1)
    with pytest.raises(ConfigError, match=r"'moments.pt' of .* bytes .* save its tensors as a"):
        coordinator_of().attach("moments.pt", tmp_path / "moments.pt", step=4)


def test_they_go_with_the_checkpoint_and_not_with_the_sync_before_it(
    saves: Saves, job: Job
) -> None:
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL, kind="state_dict")
    job.commit(4, "model", kind="state_dict")
    saves.save(4, {**MODEL, "optim": {}})
    job.commit(4, "model", "optim", "attachments")
    assert saves.attachment(4, "position") == b"17"


def test_each_rank_has_its_own(coordinator_of: Open, job: Job) -> None:
    job.world_size = 2
    ranks = [coordinator_of(rank, 2) for rank in (0, 1)]
    for rank, saves in enumerate(ranks):
        saves.attach("position", str(rank).encode(), step=4)
        saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert [saves.attachment(4, "position") for saves in ranks] == [b"0", b"1"]
    assert ranks[0].attachment(4, "position", rank=1) == b"1"


def test_a_step_without_what_was_attached_is_not_committed(saves: Saves, job: Job) -> None:
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL)
    with pytest.raises(MissingShardsError, match="lacks attachments of rank 0"):
        job.commit(4, "model")


def test_what_was_attached_to_another_step_is_not_part_of_this_one(saves: Saves, job: Job) -> None:
    saves.attach("position", b"3", step=3)  # which is never saved
    saves.attach("position", b"5", step=5)
    saves.save(4, MODEL)
    job.commit(4)
    saves.save(5, MODEL)
    job.commit(5, "model", "attachments")
    assert not (job.root / "global_step_4/attachments").exists()
    assert saves.attachment(5, "position") == b"5"


def test_what_comes_too_late_or_is_misnamed_or_missing_is_refused(
    saves: Saves, job: Job, tmp_path: Path
) -> None:
    for name in ("../x", "", ".hidden", "a/b", "rank_1", "x" * 201):
        with pytest.raises(ConfigError, match="attachment"):
            saves.attach(name, b"", step=4)
    with pytest.raises(ConfigError, match="nowhere"):
        saves.attach("x", tmp_path / "nowhere", step=4)
    saves.save(4, MODEL)
    with pytest.raises(ConfigError, match="attach before the save"):
        saves.attach("x", b"", step=4)
    job.commit(4)
    with pytest.raises(CommitError, match="no file attachments/x"):
        saves.attachment(4, "x")


def test_an_attachment_that_the_commit_would_refuse_is_refused_at_the_call_and_not_attached(
    saves: Saves, job: Job, tmp_path: Path
) -> None:
    for name in ("buffer.tmp", "manifest.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(ConfigError, match="pass bytes, or the path of a file"):
        saves.attach("x", "a\0b", step=4)
    saves.attach_folder("queue", tmp_path / "manifest.json", step=4)
    saves.attach_folder("buffer", tmp_path / "buffer.tmp", step=4)
    saves.attach("manifest.json", b"x", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    attached = job.root / "global_step_4/attachments"
    names = {str(path.relative_to(attached)) for path in attached.rglob("*") if path.is_file()}
    assert names == {"manifest.json", "queue/manifest.json", "buffer/buffer.tmp"}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        *(((name,), "pass a path below the folder") for name in ("../x", "/x", "", "x" * 201)),
        *(((name,), "pass a path below the folder") for name in ("a/" + "é" * 101, "\udcff")),
        (("model_world_size_1_rank_0.pt",), "a name that trinity_sync uses itself"),
        ((f"below/.x.{'ab' * 16}.tmp",), "a name that trinity_sync uses itself"),
        # two paths of one file, and a path below another
        *((names, "cannot be saved") for names in (("a/c", "a//c"), ("./b", "b"), ("b/",))),
        *((names, "cannot be saved") for names in (("a", "a/b"), ("a/b/c", "a"))),
    ],
)
def test_metadata_that_no_file_can_have_the_name_of_is_refused_at_the_call(
    saves: Saves, job: Job, names: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        saves.save(4, MODEL, metadata=dict.fromkeys(names, b"x"))
    longest = "b/" + "x" * 200
    saves.save(4, MODEL, metadata={"a/c": b"1", "a.json": b"2", "ab": b"3", longest: b"x"})
    job.commit(4, "model", "metadata")
    assert (job.root / "global_step_4/actor" / longest).read_bytes() == b"x"


def test_a_role_with_the_folder_of_the_attachments_is_refused(coordinator_of: Open) -> None:
    with pytest.raises(ConfigError, match="rename the role"):
        coordinator_of(roles=("actor", "attachments"))
    with pytest.raises(ConfigError, match="rename the role"):
        coordinator_of().save(4, MODEL, role="attachments", kind="state_dict")


def test_what_comes_while_the_step_or_after_a_later_one_is_saved_is_refused(
    saves: Saves, job: Job
) -> None:
    saves.save(10, {"model": {"w": torch.ones(1 << 24)}}, overlap=True)
    with pytest.raises(ConfigError, match="step 10: 'x' can no longer be attached"):
        saves.attach("x", b"", step=10)
    saves.attach("position", b"20", step=20)
    saves.wait_staged()
    saves.save(20, MODEL)
    with pytest.raises(ConfigError, match="since step 20 was submitted"):
        saves.attach("x", b"", step=10)
    job.commit(20, "model", "attachments")
    assert saves.attachment(20, "position") == b"20"


def test_a_save_that_failed_and_is_called_again_takes_them_along(saves: Saves, job: Job) -> None:
    saves.attach("position", b"17", step=4)
    with pytest.raises(ImageError, match=r"model cannot be staged"):
        saves.save(4, {"model": {"cannot be pickled": lambda: 0}})
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert saves.attachment(4, "position") == b"17"


@pytest.mark.parametrize(
    "meanwhile", ["nothing", "optim is evicted", "optim has changed", "metadata has changed"]
)
def test_a_save_whose_flow_failed_and_is_called_again_commits_all_of_it(
    coordinator_of: Open, job: Job, tmp_path: Path, meanwhile: str
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/config.json").write_text("{}")
    states = {**MODEL, "optim": {"m": torch.zeros(9)}}
    saves.attach("position", b"17", step=4)
    in_the_way = job.root / "global_step_4"
    in_the_way.write_text("so that nothing can be written")
    first = saves.save(4, states, metadata=tmp_path / "meta")
    with pytest.raises(SaveFailedError, match="cannot write model of step 4"):
        saves.wait_all(250)
    in_the_way.unlink()
    if meanwhile == "optim is evicted":
        for step in (5, 6):
            job.stage(step, {"optim": states["optim"]}, run_key=job.key_of(1))
        for step in (5, 6):
            job.commit(step, "optim")
    elif meanwhile == "optim has changed":
        states["optim"]["m"] += 1
    elif meanwhile == "metadata has changed":
        (tmp_path / "meta").rename(tmp_path / "meta-4")
        (tmp_path / "meta-4/config.json").write_text("[]")
    (metadata,) = tmp_path.glob("meta*")
    again = saves.save(4, states, metadata=metadata)
    assert saves.save(4, states, metadata=metadata).images == ()  # it is under way
    saves.wait_all(250)
    assert len({*again.images} & {*first.images}) == (4 if meanwhile == "nothing" else 3)
    assert saves.attachment(4, "position") == b"17"
    assert require_committed(job.root, 4).find_file("actor/config.json")
    found = (job.root / "global_step_4/actor/config.json").read_text()
    assert found == (metadata / "config.json").read_text()
    assert torch.equal(load_states(job.root, 4, "actor")["optim"]["m"], states["optim"]["m"])
    saves._watcher._trigger.finish()
    assert not [each for each in job.spool.tickets()[0] if each.ticket.step == 4]


@pytest.mark.parametrize("overlap", [True, False])
def test_other_metadata_than_that_of_the_first_save_of_a_step_is_named_and_not_saved(
    coordinator_of: Open, job: Job, caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    saves, said = coordinator_of(), "its metadata is that of the first save of the step"
    saves.save(4, MODEL, metadata={"config.json": b"1"}, overlap=overlap)
    saves.save(4, MODEL)
    saves.save(4, MODEL, metadata={"config.json": b"1"})
    assert said not in caplog.text
    for kind in ("checkpoint", "state_dict"):
        caplog.clear()
        assert saves.save(4, MODEL, kind=kind, metadata={"config.json": b"2"}).images == ()
        assert said in caplog.text
    job.commit(4, "model", "metadata")
    assert (job.root / "global_step_4/actor/config.json").read_bytes() == b"1"


@pytest.mark.parametrize("late", ["metadata", "export"])
def test_a_sync_after_its_checkpoint_waits_for_no_rank_that_submits_nothing(
    coordinator_of: Open, job: Job, late: str
) -> None:
    job.world_size = 2
    trigger = CommitsWhenTold()
    ranks = [coordinator_of(rank, 2, trigger=trigger) for rank in (0, 1)]
    states = {"model": MODEL["model"], "extra_state": {"rng": torch.zeros(3)}}
    for saves in ranks:
        saves.save(4, states, replicated=("model",))
    for saves in ranks:
        if late == "metadata":
            saves.save(4, MODEL, kind="state_dict", metadata={"config.json": b"1"})
        else:
            saves.save(4, MODEL, kind="state_dict", export="hf_model")
    sealed = [each.ticket for each in job.spool.tickets()[0] if each.ticket.kind == "state_dict"]
    assert [each.rank for each in sealed] == ([] if late == "metadata" else [0, 1])
    trigger.go()
    for saves in ranks:
        with suppress(SaveFailedError):  # an export of a plain dict
            saves.wait_all(250)


def test_a_corrupted_attachment_is_not_given_out(saves: Saves, job: Job) -> None:
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    (job.root / "global_step_4/attachments/position").write_bytes(b"71")
    with pytest.raises(CommitError, match="is corrupted"):
        saves.attachment(4, "position")


class ComesSecond(CommitsHere):
    """Its request finds that there is a flow run for the step already."""

    def submit(self, request: SaveRequest) -> None:
        pass


def test_they_are_committed_also_if_another_role_asks_for_the_commit_first(
    coordinator_of: Open,
) -> None:
    roles = ("actor", "critic")
    actor = coordinator_of(roles=roles, trigger=ComesSecond())
    critic = coordinator_of(roles=roles, trigger=CommitsHere())
    actor.attach("position", b"17", step=4)
    actor.save(4, {**MODEL, "optim": {}}, role="actor")
    critic.save(4, MODEL, role="critic")
    critic.wait_all()
    assert actor.attachment(4, "position") == b"17"


def test_the_role_that_is_saved_first_takes_them_and_no_other_does(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of(roles=("actor", "critic"))
    saves.attach("position", b"17", step=4)
    for role in ("actor", "critic"):
        saves.save(4, MODEL, role=role)
    tickets = [each.ticket for each in job.spool.tickets()[0]]
    assert [each.role for each in tickets if each.component == "attachments"] == ["actor"]


def test_a_folder_that_is_attached_again_replaces_what_had_its_name(
    saves: Saves, job: Job, tmp_path: Path
) -> None:
    for name, files in (("one", "ab"), ("two", "b")):
        (tmp_path / name).mkdir()
        for each in files:
            (tmp_path / name / each).write_text(name)
    saves.attach("q", b"a file", step=4)
    saves.attach("qq", b"another", step=4)
    saves.attach_folder("q", tmp_path / "one", step=4)
    saves.attach_folder("q", tmp_path / "two", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    attached = job.root / "global_step_4/attachments"
    found = {path.relative_to(attached).as_posix(): path for path in attached.rglob("*")}
    assert sorted(found) == ["q", "q/b", "qq"]
    assert found["q/b"].read_text() == "two"


@pytest.mark.parametrize("content", ["/etc/hostname", bytearray(b"x"), None])
def test_metadata_that_is_neither_bytes_nor_a_path_is_refused_at_the_call(
    saves: Saves, content: Any
) -> None:
    with pytest.raises(ConfigError, match="pass its content as bytes"):
        saves.save(4, MODEL, metadata={"config.json": content})


def test_a_file_that_has_more_bytes_than_its_size_says_fails_the_save(saves: Saves) -> None:
    saves.save(3, MODEL)
    handle = saves.save(4, MODEL, metadata={"cpu": Path("/proc/cpuinfo")})
    assert "/proc/cpuinfo had 0 bytes and has " in handle.failure
