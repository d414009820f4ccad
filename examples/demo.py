"""The whole product in four minutes on two cores: train, kill, commit, resume, compare.

A Prefect server, Ray and the flow worker are started on this machine by ``trinity-sync``, the
command of the stack's environment, unless they run; this environment is a trainer's and has none of
them. veRL trains a tiny model with GRPO on two FSDP2 ranks; both ranks and the explorer are killed
the moment after a checkpoint was handed over. That checkpoint still commits, with the explorer's
state in it, and a new run resumes from it. An uninterrupted repetition shows that nothing was lost:
prompts, losses, weights and optimizer state are equal to the last bit.

Run it with ``python examples/demo.py``. By default the explorer reads the weights that are
committed; with ``--sync memory`` those in shared memory, with ``--sync delta`` what changed there
since the last ones; ``--sync nccl`` broadcasts them (by gloo).
``KEEP=1`` leaves the stack up, to look at the saves in the Prefect UI, and keeps the images.
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
    parser.add_argument(
        "--sync", choices=("checkpoint", "memory", "delta", "nccl"), default="checkpoint"
    )
    sync = parser.parse_args().sync
    if shutil.which("trinity-sync") is None:
        sys.exit("the demo cannot run: trinity-sync, the command of the stack, is not on PATH")
    keep = os.environ.get("KEEP") == "1"
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    print("starting a Prefect server, Ray and the flow worker, or finding them", flush=True)
    ran = trinity_sync("status") == 0
    try:
        status = told(["trinity-sync", "run", "--", sys.executable, "-m", "grpo_copy.story"], sync)
    finally:
        if not ran and not keep:
            trinity_sync("down")
    if keep:
        print("the stack stays up; stop it with: trinity-sync down")
    elif status == 0:
        tidy_up(Settings())
    return status


def told(command: list[str], sync: str) -> int:
    """Run the story to its end; returns its exit status. Ctrl-C ends it, and is waited for."""
    story = subprocess.Popen(
        [*command, str(OUTPUT), sync],
        env={**os.environ, **_imports(), **QUIET},
        start_new_session=True,  # or it would get the terminal's Ctrl-C, and ours as well
    )
    try:
        return story.wait()
    except KeyboardInterrupt:
        story.send_signal(signal.SIGINT)
        story.wait()
        raise


def trinity_sync(*arguments: str | Path) -> int:
    """Run a command of the stack; returns its exit status."""
    return subprocess.run(["trinity-sync", *arguments], capture_output=True).returncode


def tidy_up(settings: Settings, output: Path = OUTPUT) -> None:
    """Let go of all that the demo's jobs left outside their folder, and of its ranks' meetings."""
    for job in list_job_spools(settings.spool):
        if job.root and job.root.is_relative_to(output):
            shutil.rmtree(job.folder)
    for root in output.glob("job-*"):
        trinity_sync("catalog", "forget", root)
    for meeting in output.glob("rendezvous-*"):
        meeting.unlink()


def _imports() -> dict[str, str]:
    """What lets another process import this folder's packages."""
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; what the demo had started is stopped, too", file=sys.stderr)
        sys.exit(130)
