"""Run those of veRL's own tests that concern checkpoints and workers, with our manager in place.

``python -m tests.environments.verl`` takes those that are installed with veRL, and downloads
nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import verl

REPOSITORY = Path(__file__).parents[3]
WANTED = (
    "checkpoint_engine/test_fsdp_lora_only_checkpoint_on_cpu.py",
    "checkpoint_engine/test_global_steps_on_cpu.py",
    "single_controller/test_decorator_on_cpu.py",
    "single_controller/test_fused_workers_on_cpu.py",
    "single_controller/test_get_set_dispatch_collect_cpu.py",
    "trainer/test_constants_ppo_on_cpu.py",
)


def main() -> int:
    """Exit code of the tests; 0 with a word where veRL came without them."""
    sources = Path(verl.__file__).parents[1] / "tests"
    there = [str(sources / name) for name in WANTED if (sources / name).exists()]
    print(f"{len(there)} of {len(WANTED)} test files are installed with veRL {verl.__version__}")
    if not there:
        return 0
    own = ["-p", "tests.environments.verl.our_manager", "-c", os.devnull, "--import-mode=importlib"]
    path = os.pathsep.join([str(REPOSITORY / "examples/demo"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, *there]
    return subprocess.call(command, env=environment, cwd=REPOSITORY)


if __name__ == "__main__":
    sys.exit(main())
