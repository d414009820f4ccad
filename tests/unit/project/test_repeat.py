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


LEAVES = """
import atexit, colorsys, os, signal, subprocess, sys, tempfile, threading
from tests import conftest
from tests.conftest import nothing_is_left_behind

conftest.ENDS_S = 0.0
left = []

def test_a_variable():
    os.environ["TRINITY_SYNC_LEFT"] = os.environ["HOME"] = "behind"

def test_a_folder(tmp_path):
    assert "TRINITY_SYNC_LEFT" not in os.environ and os.environ["HOME"] != "behind"
    os.chdir(tmp_path)

def test_settings():
    os.umask(0o123)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.path.append("behind")
    sys.modules["colorsys"] = None

def test_a_thread():
    threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()

def test_a_process():
    left.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
    left[0].stdin.write(b"?")
    assert left[0].stdout.read(1)  # it runs

def test_a_spool():
    atexit.register(os.rmdir, tempfile.mkdtemp(prefix=conftest.SPOOLS, dir="/dev/shm"))

def test_nothing():
    left.pop().kill()
    conftest.ENDS_S = 60.0
    subprocess.run(["true"])
    subprocess.Popen(["true"])
"""


def test_a_test_that_leaves_something_behind_fails_and_says_what(tmp_path: Path) -> None:
    done = run_tests(tmp_path, LEAVES, "--tb=line")
    assert "7 passed, 6 errors" in done.stdout
    settings = ("umask ['0123']", "SIGUSR2", "'behind'", "module colorsys")
    living = ("['cat']", "sync-test-", "Thread-1 (<lambda>)")
    for left in ("HOME", "SYNC_LEFT", "folder /", *settings, *living):
        assert left in done.stdout, done.stdout


def run_tests(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return run(folder, "pytest", *options)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": str(Path(__file__).parents[3]), "FAILED_TESTS": "failed.jsonl"}
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of others, whose import takes a second
    python, env = [sys.executable, "-m", *command], os.environ | own
    return subprocess.run(python, cwd=folder, env=env, capture_output=True, text=True)


def run_and_repeat(folder: Path, tests: str) -> tuple[int, subprocess.CompletedProcess[str]]:
    """Run tests as `.ci/run` does, two at a time; return the exit code and the repetition."""
    plugins = ("-p", "xdist.plugin", "-p", "tests.repeat", "--numprocesses", "2")
    ended = run_tests(folder, tests, *plugins)
    return ended.returncode, run(folder, "tests.repeat", "failed.jsonl")
