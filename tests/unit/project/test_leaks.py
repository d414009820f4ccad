import os
import subprocess
import sys
from pathlib import Path

TESTS = """
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
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    own = {"PYTHONPATH": str(Path(__file__).parents[3]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "--tb=line"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True
    )
    assert "7 passed, 6 errors" in done.stdout
    settings = ("umask ['0123']", "SIGUSR2", "'behind'", "module colorsys")
    living = ("['cat']", "sync-test-", "Thread-1 (<lambda>)")
    for left in ("HOME", "SYNC_LEFT", "folder /", *settings, *living):
        assert left in done.stdout, done.stdout
