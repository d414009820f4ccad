"""A reader that never stops: each newest commit, whole and of one step, while the rest breaks."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import ray

from tests.models.chaos.training import Expected, Notes, digest
from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.weights.synchronizer import Synchronizer

PAUSE_S = 0.3


def main() -> None:
    root, notes = sys.argv[1], Notes(Path(sys.argv[2]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    synchronizer = None
    # there is memory for one Ray cluster: that of the stack also serves this training
    if address := os.environ["TRINITY_SYNC_STACK__RAY__ADDRESS"]:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        synchronizer = Synchronizer.get_actor(root=root)
    expected, had = Expected(), (0, 0)
    while True:
        time.sleep(PAUSE_S)
        found = find_newest(root, "state_dict")
        if found is None or (found.run, found.step) == had:
            continue
        try:
            with lease_to_read(root, found.step, "explorer"):
                states = load_states(root, found.step, "actor", rank=0, world_size=2)
        except CommitError as error:  # retention was faster, or a later run replaced it
            notes("missed", step=found.step, why=str(error))
            continue
        if digest(states) != expected[found.step] or states["extra_state"]["step"] != found.step:
            notes("torn", step=found.step, run=found.run)
        if (found.run, found.step) < had:
            notes("went back", step=found.step, run=found.run, had=had)
        had = found.run, found.step
        try:
            asked = synchronizer and synchronizer.latest.remote()
            version = asked and ray.get(asked, timeout=30)
            notes("read", step=found.step, run=found.run, told=version and version.step)
        except (ray.exceptions.RayError, TrinitySyncError, TimeoutError) as error:
            notes("no answer", why=type(error).__name__)


if __name__ == "__main__":
    main()
