import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import repeat

TESTS = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_name("mark")
    first = not mark.exists()
    mark.touch()
    assert not first, "only at first"

def test_passes():
    pass
"""


def test_a_test_that_fails_once_is_named_as_flaky_with_what_it_said(tmp_path: Path) -> None:
    ended, repeated = run_and_repeat(tmp_path, TESTS)
    assert (ended, repeated.returncode) == (1, 0)
    assert "flaky: test_it.py::test_fails_once" in repeated.stdout
    assert "AssertionError: only at first" in repeated.stdout
    assert "test_passes" not in repeated.stdout


def test_a_test_that_fails_twice_and_a_file_that_cannot_be_imported_fail_the_gate(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name")
    _, repeated = run_and_repeat(tmp_path, f"{TESTS}\ndef test_fails():\n    assert not 'again'\n")
    assert repeated.returncode == 1
    for failed in ("test_it.py::test_fails", "test_other.py"):
        assert f"failed twice: {failed}\n" in repeated.stdout


def test_no_failure_and_failures_in_many_files_are_not_repeated_and_many_in_one_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "AT_MOST", 1)
    passes = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(repeat.subprocess, "run", lambda _: passes)
    failed = tmp_path / "failed.jsonl"
    tests = [json.dumps([f"test_{file}", "why"]) for file in ("a.py::one", "a.py::two", "b.py")]
    failed.write_text("\n".join(tests[:2]))
    assert repeat.repeat(failed) == 0
    for text in ("\n".join(tests), ""):  # the last of a run that has ended otherwise
        failed.write_text(text)
        assert repeat.repeat(failed) == 1


def run_and_repeat(folder: Path, tests: str) -> tuple[int, subprocess.CompletedProcess[str]]:
    """Run tests as `.ci/run` does, two at a time; return the exit code and the repetition."""
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    own = {"PYTHONPATH": str(Path(__file__).parents[3]), "FAILED_TESTS": "failed.jsonl"}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of others, whose import takes a second

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        python = [sys.executable, "-m", *command]
        env = os.environ | own
        return subprocess.run(python, cwd=folder, env=env, capture_output=True, text=True)

    ended = run("pytest", "-p", "xdist.plugin", "-p", "tests.repeat", "--numprocesses", "2")
    return ended.returncode, run("tests.repeat", "failed.jsonl")
