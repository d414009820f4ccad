"""A short run; ``make whole-run`` has a hundred kills."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(240)
def test_a_killed_run_trains_each_prompt_once() -> None:
    command = [sys.executable, "-m", "tests.environments.whole_run", "--kills", "2", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost, 0 trained twice" in done.stdout
    print(done.stdout)
