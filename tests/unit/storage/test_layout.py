"""Names that look like a step or a job and are none, and names of roots that are hard to bear."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.support.job import Job
from tests.support.steps import commit_files
from trinity_sync.errors import ConfigError
from trinity_sync.layout import (
    is_below,
    is_path,
    is_step_folder,
    job_id_of,
    name_job,
    refuse_url,
    split_role_path,
    step_folder,
    steps_on_disk,
)
from trinity_sync.orchestration.job_registry import list_known_roots
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import register_root
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.storage.discovery import find_newest, iter_committed_steps

NO_STEPS = ["007", "\u0667", "+7", "-7", "7_0", " 7", "7 ", "7\n", "", "9" * 19, "7.bak", "0x7"]


@pytest.mark.parametrize("name", [f"global_step_{text}" for text in NO_STEPS])
def test_a_step_has_one_name(tmp_path: Path, name: str) -> None:
    shutil.copytree(commit_files(tmp_path, 7), tmp_path / name)
    assert steps_on_disk(tmp_path) == [7]
    assert len(list(iter_committed_steps(tmp_path))) == 1
    assert not is_step_folder(name)
    with pytest.raises(ConfigError, match="not of the form"):
        split_role_path(tmp_path / name / "actor")


@pytest.mark.parametrize(
    "path",
    ["a", "actor/a.pt", "a//b", "./a", "a/", "...", ".a", "..a", "a..", "a\nb", "\udcff", "\u00e9"],
)
def test_a_path_stays_below_the_steps_folder(path: str) -> None:
    assert is_below(path)
    assert is_path(path)


@pytest.mark.parametrize(
    "path",
    ["", ".", "./", ".//.", "/", "/a", "..", "../a", "a/..", "a/../b", "a\n/../b", "a\0", "\ud800"],
)
def test_a_path_that_leads_elsewhere_or_names_nothing_is_not_below_it(path: str) -> None:
    assert not is_below(path)


@pytest.mark.parametrize("step", [0, 7, 10**18 - 1])
def test_a_step_of_any_number_is_found(tmp_path: Path, step: int) -> None:
    step_folder(tmp_path, step).mkdir()
    assert steps_on_disk(tmp_path) == [step]
    assert split_role_path(step_folder(tmp_path, step) / "actor") == (tmp_path, step, "actor")


def test_what_is_no_folder_is_no_step_and_a_manifest_that_is_no_file_hides_no_other(
    tmp_path: Path,
) -> None:
    for step in (7, 8, 9):
        commit_files(tmp_path, step)
    for step in (8, 9):
        (step_folder(tmp_path, step) / "manifest.json").unlink()
    (tmp_path / "global_step_8/manifest.json").mkdir()
    (tmp_path / "global_step_9/manifest.json").symlink_to("manifest.json")
    (tmp_path / "global_step_10").touch()
    (tmp_path / "global_step_11").symlink_to(tmp_path / "gone")
    (tmp_path / "global_step_12").symlink_to("global_step_12")
    assert steps_on_disk(tmp_path) == [7, 8, 9]
    assert find_newest(tmp_path).step == 7


@pytest.mark.parametrize(
    "name", ["line\nfeed", "carriage\rreturn", "crlf\r\n", "a" * 250, "…" * 80]
)
def test_a_root_of_any_name_saves_and_is_known(
    tmp_path: Path, spool_folder: Path, name: str, settings: Settings
) -> None:
    root = tmp_path / name
    refuse_url(root)
    with closing(Job.open(root, spool_folder)) as job:
        job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    assert find_newest(root).step == 4
    assert job.spool.read_root() == root
    assert get_job_spool(job.spool.folder, job.save(4)) == job.spool
    register_root(settings.home, root)
    assert list_known_roots(settings, StackSettings()) == [root]


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/a/grpo", "grpo"),
        ("/a/exp1/ckpts", "exp1/ckpts"),
        ("/a/exp1/Checkpoints", "exp1/Checkpoints"),
        ("/ckpts", "ckpts"),
    ],
)
def test_the_name_of_a_job_is_its_folder_with_the_parent_of_a_common_name(
    root: str, name: str
) -> None:
    assert name_job(Path(root)) == name


def test_the_identifier_of_a_job_in_a_folder_with_a_common_name_has_the_parent() -> None:
    assert job_id_of(Path("/a/exp 1/ckpts")).startswith("exp-1-ckpts-")
    assert "-ckpts-" in job_id_of(Path(f"/a/{'x' * 200}/ckpts"))


def test_a_root_whose_name_is_no_text_is_refused_and_has_a_job_of_its_own(tmp_path: Path) -> None:
    roots = [tmp_path / os.fsdecode(b"ckpts\xff"), tmp_path / os.fsdecode(b"ckpts\xfe")]
    for root in (*roots, tmp_path / "ck\0pts"):
        with pytest.raises(ConfigError, match="not valid UTF-8"):
            refuse_url(root)
    assert len({job_id_of(root) for root in roots}) == 2
