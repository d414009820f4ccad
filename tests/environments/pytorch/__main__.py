"""Run PyTorch's own tests of DCP on trinity_sync's storage writer, stager and reader.

``python -m tests.environments.pytorch CHECKOUT [FILES] [OPTIONS OF PYTEST]`` takes the tests from a
checkout of PyTorch of the installed version, because its wheel comes without them, and downloads
nothing. The saves are flow runs on a Prefect server and Ray, which are started for it. `suite` says
which tests are left out, and how many have to pass; any other number, and any other outcome, fails
the run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import running_stack
from tests.environments.pytorch.suite import FILES, FOLDER, LEFT_OUT_FILES
from trinity_sync.settings import Settings

REPOSITORY = Path(__file__).parents[3]
PLUGINS = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:logging",
    "-p",
    "tests.environments.pytorch.our_storage",
)


def main(checkout: str, *arguments: str) -> int:
    """Return the exit code of the tests."""
    tests = (Path(checkout) / FOLDER).resolve()
    there = {str(path.relative_to(tests)) for path in tests.rglob("test_*.py")}
    if unlisted := sorted(there.difference(FILES, " ".join(LEFT_OUT_FILES.values()).split())):
        print(f"not listed in tests/environments/pytorch/suite.py: {', '.join(unlisted)}")
        return 1
    wanted = [name for name in arguments if name in FILES] or list(FILES)
    if absent := sorted({*wanted} - there):
        print(f"{tests} lacks {', '.join(absent)}; pass the checkout of PyTorch's repository")
        return 1
    options = [each for each in arguments if each not in wanted]
    files = [str(tests / name) for name in wanted]
    with (
        tempfile.TemporaryDirectory(prefix="trinity_sync-test-") as home,
        tempfile.TemporaryDirectory(prefix="trinity_sync-test-", dir="/dev/shm") as spool,
        running_stack(Settings(home=Path(home), spool=Path(spool)), {"TMPDIR": home}),
    ):
        ranks = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *PLUGINS, *options]
        return subprocess.call([*command, *files], env=os.environ | ranks, cwd=home)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
