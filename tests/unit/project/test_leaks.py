import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.support.forked import forking

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


def test_files_run_in_an_order_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def order_by(seed: str) -> list[Path]:
        monkeypatch.setenv("FILES_SEED", seed)
        items: Any = [SimpleNamespace(path=Path(f"test_{n // 2}.py")) for n in range(40)]
        config: Any = SimpleNamespace(stash={})
        pytest_collection_modifyitems(config, items)
        return [item.path for item in items]

    assert order_by("7") == order_by("7") != order_by("8")
    assert sorted(order_by("7"), key=order_by("").index) == order_by("")


def _has_imported(*names: str) -> bool:
    return all(name in sys.modules for name in names)


def test_processes_are_forked_from_one_that_has_imported_what_they_ask_for() -> None:
    for name in ("wave", "tabnanny"):
        with forking(name) as context, ProcessPoolExecutor(1, context) as pool:
            assert pool.submit(_has_imported, name).result()
