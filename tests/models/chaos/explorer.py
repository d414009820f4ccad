"""A reader that never stops: each newest commit, whole and of one step, while the rest breaks."""

import faulthandler
import signal
import sys
import time
from pathlib import Path

from tests.models.chaos.training import Expected, Notes, digest
from trinity_sync.errors import CommitError
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.steps_in_use import lease_to_read

PAUSE_S = 0.3


def main() -> None:
    root, notes = sys.argv[1], Notes(Path(sys.argv[2]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
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
        notes("read", step=found.step, run=found.run)


if __name__ == "__main__":
    main()
