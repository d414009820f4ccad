"""End-to-end demo in four minutes on two cores: train, kill, commit, resume, compare.

``trinity-sync``, the command of the stack's environment, starts a Prefect server, Ray and the flow
worker on this machine, unless they run already; this is the trainer's environment and has none of
them. veRL trains a tiny model with GRPO on two FSDP2 ranks. Both ranks and the explorer are killed
right after a checkpoint was submitted. That checkpoint is still committed, with the explorer's
state, and a new run resumes from it. An uninterrupted run shows that nothing was lost: prompts,
losses, weights and optimizer state are bit-equal.

Run it with ``python examples/demo/demo.py``. By default the explorer reads committed weights; with
``--sync memory`` those in shared memory; ``--sync nccl`` broadcasts them (over gloo).
``KEEP=1`` leaves the stack running, to show the saves in the Prefect UI, and keeps the images.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from trinity_sync import Settings
from trinity_sync.snapshot.spool import list_job_spools

OUTPUT = Path("demo-output").resolve()
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sync", choices=("checkpoint", "memory", "nccl"), default="checkpoint")
    sync = parser.parse_args().sync
    if shutil.which("trinity-sync") is None:
        sys.exit("the demo cannot run: trinity-sync, the command of the stack, is not on PATH")
    keep = os.environ.get("KEEP") == "1"
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    print("starting a Prefect server, Ray and the flow worker, unless they run", flush=True)
    was_running = is_stack_running()
    try:
        command = ["trinity-sync", "run", "--", sys.executable, "-m", "grpo_copy.story"]
        status = run_story(command, sync)
    finally:
        if not was_running and not keep:
            trinity_sync("down", "--yes")
    if keep:
        print("the stack is still running; stop it with: trinity-sync down")
    elif status == 0:
        clean_up(Settings())
    return status


def run_story(command: list[str], sync: str) -> int:
    """Run the training in a process of its own; returns its exit status. Ctrl-C stops it."""
    story = subprocess.Popen(
        [*command, str(OUTPUT), sync],
        env={**os.environ, **_import_path(), **QUIET},
        start_new_session=True,  # otherwise it gets Ctrl-C twice, from the terminal and from us
    )
    try:
        return story.wait()
    except KeyboardInterrupt:
        story.send_signal(signal.SIGINT)
        story.wait()
        raise


def is_stack_running() -> bool:
    """Return whether a stack runs; without ``stack``, none is as good, since savers do its work."""
    return trinity_sync("status", TRINITY_SYNC_SAVER="stack") == 0


def trinity_sync(*arguments: str | Path, **variables: str) -> int:
    """Run a command of the stack; returns its exit status."""
    env = {**os.environ, **variables}
    return subprocess.run(["trinity-sync", *arguments], capture_output=True, env=env).returncode


def clean_up(settings: Settings, output: Path = OUTPUT) -> None:
    """Remove the spools and catalog entries of the demo's jobs, and rendezvous files."""
    for job in list_job_spools(settings.spool):
        if (root := job.read_root()) and root.is_relative_to(output):
            shutil.rmtree(job.folder)
    for root in output.glob("job-*"):
        trinity_sync("jobs", "forget", root, "--yes")
    for rendezvous in output.glob("rendezvous-*"):
        rendezvous.unlink()


def _import_path() -> dict[str, str]:
    """Return the environment with which another process imports this folder's packages."""
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped, with everything that the demo started", file=sys.stderr)
        sys.exit(130)
