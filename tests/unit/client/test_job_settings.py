"""The settings of a job, which every process reads in the root."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trinity_sync import CheckpointCoordinator, ConfigError, Settings
from trinity_sync.client.init_root import set_job_settings
from trinity_sync.fs.atomic import TRUSTED
from trinity_sync.fs.records import encode_body
from trinity_sync.layout import job_id_of
from trinity_sync.storage.job_settings import (
    JobSettings,
    read_job_settings,
    read_set_job_settings,
    write_job_settings,
)


def file_of(root: Path) -> Path:
    return root / ".trinity_sync/job.json"


def test_only_what_was_set_is_written_and_the_rest_stays(root: Path) -> None:
    write_job_settings(root, {})
    assert not file_of(root).exists()
    assert read_job_settings(root) == JobSettings()
    set_job_settings(root, {"keep": "last=3", "rank_timeout_s": "30"})
    found = set_job_settings(root, {"keep_weights": "last=1"})
    assert found == read_job_settings(root)
    assert found == JobSettings(keep="last=3", keep_weights="last=1", rank_timeout_s=30)
    assert read_set_job_settings(root) == {
        "keep": "last=3",
        "keep_weights": "last=1",
        "rank_timeout_s": 30.0,
    }
    assert set_job_settings(root, {"keep": None}).keep == "all"
    assert "keep" not in json.loads(file_of(root).read_text())


def test_a_coordinator_writes_the_settings_that_it_is_given(root: Path, settings: Settings) -> None:
    set_job_settings(root, {"keep_weights": "last=5"})
    with CheckpointCoordinator(root, job={"keep": "last=3"}, settings=settings):
        assert read_job_settings(root) == JobSettings(keep="last=3", keep_weights="last=5")
    with CheckpointCoordinator(root, settings=settings):
        assert read_job_settings(root).keep == "last=3"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kepe": "last=3"}, r"kepe is not a setting of a job; did you mean keep\?"),
        ({"colour": "red"}, r"there are keep, keep_weights"),
        ({"keep": "most"}, "'most' is unknown"),
        ({"keep": "0"}, "'0'"),
        ({"keep": "last=0"}, "'last=0'"),
        ({"remote_keep": "best=1:reward:max"}, "remotes have no metrics"),
        ({"keep_quarantine": "last=2,best=1:reward:max"}, "folders in quarantine have no metrics"),
        ({"remote": "s3://me:secret@bucket/job"}, "contains a user, a password"),
        ({"remote": "/copies/job"}, "is not the URL of a folder"),
        ({"remote": "s3://bucket//{job}"}, "an empty name between two slashes"),
        ({"remote": "file://copies/job"}, r"no full path.*file:///copies/job"),
        ({"remote": "file://localhost/copies/job"}, "with three slashes"),
        ({"remote": "local://./copies/job"}, r"pass one like local:///copies/job"),
        ({"remote_required": True}, "set remote as well"),
        ({"write_concurrency": "single_thread"}, "single_thread.*one of all, per_node"),
        ({"on_nonfinite": "fail"}, "fail.*one of warn, refuse"),
        ({"rank_timeout_s": "soon"}, "rank_timeout_s"),
        ({"rank_timeout_s": 0}, "rank_timeout_s"),
    ],
)
def test_a_wrong_name_or_value_is_refused_and_changes_nothing(
    root: Path, changes: dict[str, Any], words: str
) -> None:
    set_job_settings(root, {"keep": "last=3"})
    before = file_of(root).read_bytes()
    with pytest.raises(ConfigError, match=words):
        set_job_settings(root, changes)
    assert file_of(root).read_bytes() == before


def test_the_remote_is_written_in_full(root: Path) -> None:
    found = set_job_settings(root, {"remote": "s3://bucket/{job}/", "remote_required": True})
    assert found.remote == f"s3://bucket/{job_id_of(root)}"
    assert found.required_remote == found.remote
    assert set_job_settings(root, {"remote_required": "false"}).required_remote == ""


REMOTE = {"keep": "last=3", "remote": "file:///copies/job", "remote_required": True}


def edit(file: Path) -> None:
    file.write_text(file.read_text().replace("last=3", "last=1"))


def lead_elsewhere(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("other")))


@pytest.mark.parametrize(
    "tear",
    [
        edit,
        lead_elsewhere,
        lambda file: file.write_text(file.read_text()[:-9]),
        lambda file: file.write_text(""),
        lambda file: file.write_text(encode_body({"keep": 3})),
    ],
    ids=["edited", "link", "torn", "empty", "type"],
)
def test_of_a_torn_file_nothing_is_removed_or_copied_and_the_settings_can_be_set_again(
    root: Path, tear: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    set_job_settings(root, REMOTE)
    tear(file_of(root))
    keeps_all = JobSettings(keep="all", keep_weights="all", keep_quarantine="all")
    for _ in range(2):
        assert read_job_settings(root) == replace(keeps_all, remote_required=True)
    assert caplog.text.count("is torn or was edited") == 1
    set_job_settings(root, {"rank_timeout_s": 9.0})
    assert read_job_settings(root) == replace(keeps_all, rank_timeout_s=9.0)


def give_away(file: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(file, 12345, 12345)


@pytest.mark.parametrize(
    "given",
    [give_away, lambda file: file.chmod(0o664), lambda file: file.chmod(0o646)],
    ids=["owner", "group", "others"],
)
def test_a_remote_counts_only_from_a_file_that_no_other_user_may_write(
    root: Path,
    given: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set_job_settings(root, REMOTE).required_remote
    given(file_of(root))
    assert read_job_settings(root) == JobSettings(keep="last=3", remote_required=True)
    assert "ignoring remote in" in caplog.text
    with monkeypatch.context() as patch:
        patch.setenv(TRUSTED, str(root))
        assert read_job_settings(root).required_remote == REMOTE["remote"]
    set_job_settings(root, {"keep": "last=5"})  # the file is this user's then
    assert read_job_settings(root) == JobSettings(keep="last=5")


def test_the_file_is_this_users_whatever_the_umask(root: Path, no_umask: None) -> None:
    set_job_settings(root, REMOTE)
    assert read_job_settings(root).required_remote


def test_changes_at_the_same_time_are_all_kept(root: Path) -> None:
    changes = [{"keep": "last=3"}, {"keep_weights": "all"}, {"rank_timeout_s": 9.0}]
    for _ in range(20):
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda change: set_job_settings(root, change), changes))
        assert read_job_settings(root) == JobSettings("last=3", "all", rank_timeout_s=9.0)
        set_job_settings(root, {"keep": None, "keep_weights": None, "rank_timeout_s": None})


def test_all_ranks_write_as_the_caller_says_before_rank_0_has_written_it(
    root: Path, settings: Settings
) -> None:
    saves = CheckpointCoordinator(
        root, rank=1, world_size=2, job={"write_concurrency": "one"}, settings=settings
    )
    saves.save(1, {"model": {}})
    (sealed,) = saves.spool.tickets()[0]
    assert sealed.ticket.write_concurrency == "one"
    saves.close(timeout=0)
