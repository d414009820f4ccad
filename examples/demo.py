"""The whole product in four minutes on two cores: train, kill, commit, resume, compare.

A Prefect server, Ray and the flow worker are started on this machine (or those that
``PREFECT_API_URL`` and ``RAY_ADDRESS`` name are used); veRL trains a tiny model with GRPO on two
FSDP2 ranks; both ranks and the explorer are killed the moment after a checkpoint was handed over.
That checkpoint still commits, with the explorer's state in it, and a new run resumes from it. An
uninterrupted repetition shows that nothing was lost: prompts, losses, weights and optimizer state
are equal to the last bit.

Run it with ``python examples/demo.py``. By default the explorer reads the weights that are
committed; with ``--sync memory`` those in shared memory, with ``--sync delta`` what changed there
since the last ones; ``--sync nccl`` broadcasts them (by gloo).
``KEEP=1`` leaves the stack up, to look at the saves in the Prefect UI, and keeps the images.
"""

import argparse
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration import stack
from trinity_sync.orchestration.roots import forget_root
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import job_spools

OUTPUT = Path("demo-output").resolve()
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--sync", choices=("checkpoint", "memory", "delta", "nccl"), default="checkpoint"
    )
    sync = parser.parse_args().sync
    keep = os.environ.get("KEEP") == "1"
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    settings = Settings()
    print("starting a Prefect server, Ray and the flow worker, or finding them")
    with nullcontext(stack.up(settings)) if keep else stack.running(settings) as state:
        page = f"{state.api_url.removesuffix('/api')}/runs"
        print(f"every save will be a row in the Prefect UI: {page}")
        story = subprocess.run(
            [sys.executable, "-m", "grpo_copy.story", OUTPUT, sync],
            env={**os.environ, **state.environment, **_imports(), **QUIET},
            check=False,
        )
    if keep:
        print(f"the stack stays up: {page}; stop it with: trinity-sync down")
    elif story.returncode == 0:
        tidy_up(settings)
    return story.returncode


def tidy_up(settings: Settings, output: Path = OUTPUT) -> None:
    """Let go of all that the demo's jobs left outside their folder, and of its ranks' meetings."""
    for job in job_spools(settings.spool):
        if job.root and job.root.is_relative_to(output):
            shutil.rmtree(job.folder)
    for root in output.iterdir():
        forget_root(settings, root)
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
    except TrinitySyncError as error:
        sys.exit(f"the demo cannot run: {error}")
