"""``make whole-run``: kills a GRPO run a hundred times, and counts what it has trained.

``python -m tests.environments.whole_run [--kills 100] [--seed N]``
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # TransferQueue asks Ray, which then says 127.0.0.1
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "TQ_NUM_THREADS": "1",
    "TRINITY_SYNC_CONFIG": os.devnull,  # not the user's own file
    "TRINITY_SYNC_SAVER": "auto",  # there is no stack
}
PROMPTS_A_KILL = 150


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all of it is stopped
    parser = argparse.ArgumentParser(prog="tests.environments.whole_run", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--prompts", type=int)
    arguments = parser.parse_args()
    prompts = arguments.prompts or 64 + PROMPTS_A_KILL * arguments.kills
    folder = Path(tempfile.mkdtemp(prefix="trinity_sync-whole-run-", dir="/tmp"))
    spool = Path(tempfile.mkdtemp(prefix="trinity_sync-whole-run-", dir="/dev/shm"))
    for name in [each for each in os.environ if each.startswith(("TRINITY_SYNC_", "PREFECT_"))]:
        del os.environ[name]
    own = {"TRINITY_SYNC_HOME": str(folder / "home"), "TRINITY_SYNC_SPOOL": str(spool)}
    os.environ |= ENVIRONMENT | own  # before what reads it is imported
    from tests.environments.whole_run.run import any_behind
    from tests.environments.whole_run.supervisor import FallenError, Supervisor
    from tests.environments.whole_run.truth import Count, read

    print(f"seed {arguments.seed}, {prompts} prompts", flush=True)
    began, random = time.monotonic(), Random(arguments.seed)
    supervisor = Supervisor(folder, spool, prompts, random)
    try:
        supervisor.train(arguments.kills)
    except FallenError as error:
        print(f"FALLEN: {error}\nfolder {folder}")
        return 1
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    truth = read(folder / "truth.jsonl")
    count = Count.of(truth, prompts)
    cuts = [note for note in truth if note.get("pause_s")]
    pauses = [cut["pause_s"] for cut in cuts if not any_behind(cut["saved"])]
    kills = ", ".join(f"{name} {times}" for name, times in sorted(supervisor.killed.items()))
    print(f"{time.monotonic() - began:.0f} s, {supervisor.starts} starts, killed: {kills}")
    print(f"{count.steps} steps, {count.undone} more undone by resumes")
    if pauses:
        print(f"{len(cuts)} cuts; a median one paused the training for {median(pauses):.3f} s")
    print(f"of {prompts} prompts: {len(count.lost)} lost, {len(count.repeated)} trained twice")
    if not (count.lost or count.repeated):
        shutil.rmtree(folder)
        return 0
    print(f"lost {count.lost}, trained twice {count.repeated}; see {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
