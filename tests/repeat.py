"""Repeat the tests that failed, each once and alone, to tell those that fail by chance.

As a plugin of pytest (``-p tests.repeat``) it records failures in the file that ``FAILED_TESTS``
names. ``python -m tests.repeat FILE`` then repeats them::

    flaky: tests/unit/fs/test_locks.py::test_a_lock_is_released
    ... the first failure's text ...

It exits with 1 if one fails again, or if nothing says which failed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AT_MOST = 10
"""Files with failures beyond which chance is no explanation, and nothing is repeated."""


def pytest_configure(config: pytest.Config) -> None:
    """Record in this process, which gets the reports of all workers, and in none that it starts."""
    if path := os.environ.pop("FAILED_TESTS", ""):
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        config.pluginmanager.register(_Failures(file))


class _Failures:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._file.open("a") as lines:
                print(json.dumps([report.nodeid, report.longreprtext]), file=lines)

    pytest_collectreport = pytest_runtest_logreport  # a file that cannot be imported fails, too


def repeat(file: Path) -> int:
    """Repeat the recorded failures; return the exit code."""
    failed = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
    if not 0 < len({test.partition("::")[0] for test in failed}) <= AT_MOST:
        print(f"{len(failed)} tests have failed: not repeated")
        return 1
    again = []
    for test, text in failed.items():
        print(f"repeating {test}", flush=True)
        if subprocess.run([sys.executable, "-m", "pytest", test]).returncode:
            again.append(test)
        else:
            print(f"flaky: {test}\n{text}", flush=True)
    for test in again:
        print(f"failed twice: {test}")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(repeat(Path(sys.argv[1])))
