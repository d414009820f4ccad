"""Named pins on the command line: given, listed, used in place of numbers, and removed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import invoke
from tests.support.leases import acquire_lease
from tests.support.steps import MODEL, commit_files
from trinity_sync.layout import PRIVATE_FOLDER, step_folder
from trinity_sync.storage.discovery import Corruption, mark_corrupted
from trinity_sync.storage.steps_in_use import resolve_step, tag


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job of three steps, the first two of them tagged."""
    root = tmp_path / "ckpts"
    for step in (10, 20, 30):
        commit_files(root, step)
    tag(root, 10, "start")
    tag(root, 20, "best", "reward 0.9")
    return root


def json_of(*arguments: object) -> Any:
    done = invoke(*arguments, "-o", "json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.pop("schema") == 1
    (content,) = document.values()
    return content


def test_tags_are_listed_and_shown_with_their_steps(root: Path) -> None:
    pinned = invoke("pin", root, "best", "--name", "paper-v1")
    assert pinned.stdout == "pinned step 20 as paper-v1\n"
    rows = {row["step"]: row["tags"] for row in json_of("ls", root)}
    assert rows == {10: ["start"], 20: ["best", "paper-v1"], 30: []}
    assert "tagged best: reward 0.9; tagged paper-v1" in invoke("ls", root).stdout
    assert "step 20 of run 1" in invoke("show", root, "best").stdout
    assert "tagged best: reward 0.9, tagged paper-v1" in invoke("show", root, 20).stdout
    assert json_of("show", root, "best")["tags"] == ["best", "paper-v1"]


def test_a_tag_serves_wherever_a_step_is_asked_for(root: Path, tmp_path: Path) -> None:
    assert [v["step"] for v in json_of("verify", root, "best")] == [20]
    url = f"file://{tmp_path}/store"
    assert json_of("remote", "push", root, "best", url)["step"] == 20
    assert "20" in invoke("ls", url).stdout
    assert invoke("pin", root, "best").stdout == "pinned step 20\n"
    unpinned = invoke("unpin", root, 20).stdout
    assert unpinned == "unpinned step 20\nstep 20 is still pinned as best\n"
    assert "step 20 in" in invoke("export", "hf", root, "best", "--role", "critic").stderr
    assert invoke("unpin", root, "best").stdout == "unpinned step 20\n"
    assert json_of("rewind", root, "start", "--yes")["quarantined"] == [30, 20]


def test_rm_removes_what_only_policies_keep(root: Path) -> None:
    commit_files(root, 40)
    mark_corrupted(root, 30, Corruption({MODEL: "was replaced"}, 1.7e9))
    commit_files(root, 50, kind="state_dict")
    commit_files(root, 60, kind="state_dict")
    with acquire_lease(root, 10, "a reader"):
        for step, why in (
            (10, "a reader"),
            (20, "tagged best"),
            (30, "corrupted"),
            (40, "newest checkpoint"),
            (60, "newest state_dict"),
            (70, "not committed"),
        ):
            refused = invoke("rm", root, 50, step, "--yes")
            assert refused.exit_code == 1
            assert re.search(f"step {step} in .* is not .*{why}", refused.stderr), refused.stderr
    assert len(json_of("ls", root)) == 6
    assert invoke("unpin", root, "start").exit_code == 0
    assert invoke("rm", root, 10).exit_code == 2  # there is no terminal to ask on
    removed = json_of("rm", root, 10, "50", "--yes")
    assert [(row["step"], row["status"]) for row in removed["steps"]] == [
        (50, "removed"),
        (10, "removed"),
    ]
    assert [row["step"] for row in json_of("ls", root)] == [60, 40, 30, 20]


def test_rm_says_what_frees_the_files_of_a_step_whose_removal_was_killed(root: Path) -> None:
    trash = root / PRIVATE_FOLDER / "trash"
    trash.mkdir()
    step_folder(root, 10).rename(trash / "global_step_10.0")
    refused = invoke("rm", root, 10, 20, "--yes")
    assert refused.exit_code == 1
    command = re.search(r"trinity-sync (reconcile \S+)", refused.stderr)
    assert command, refused.stderr
    assert invoke(*command[1].split()).exit_code == 0
    assert [*trash.iterdir()] == []


def test_what_cannot_be_is_one_sentence_and_changes_nothing(root: Path) -> None:
    for arguments, words in [
        (["show", "ROOT", "bset"], "'bset' is neither the number of a step, nor latest, "),
        (["verify", "ROOT", "../20"], "(tags: best, start)"),
        (["pin", "ROOT", 30, "--name", "best"], "--force"),
        (["pin", "ROOT", 30, "--name", "40"], "looks like a step number"),
        (["pin", "ROOT", 30, "--name", "a/b"], "may hold letters"),
        (["pin", "ROOT", 30, "--name", "latest"], "latest always names the newest"),
        (["unpin", "ROOT", "bset"], "nor a tag"),
    ]:
        done = invoke(*[root if each == "ROOT" else each for each in arguments])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
    assert (resolve_step(root, "best"), resolve_step(root, "start")) == (20, 10)
