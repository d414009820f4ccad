"""Trainings in a control group with little more memory, or less, than they and an image take."""

from pathlib import Path

import pytest

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.savers import end_savers
from trinity_sync import Settings
from trinity_sync.storage.discovery import find_newest

TRAINING = """
import logging, os, sys
from pathlib import Path
import torch
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.snapshot.stager import estimate_nbytes
from tests.unit.conftest import set_limit

logging.basicConfig(stream=sys.stdout)
group, root, spool, home = map(Path, sys.argv[1:5])
(group / "cgroup.procs").write_text(str(os.getpid()))
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

def step():
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()

step()
step()
used = [group / name for name in ("memory.current", "memory.usage_in_bytes")]
taken = int(next(filter(Path.exists, used)).read_text())
state = estimate_nbytes(model) + estimate_nbytes(optimizer)
set_limit(group, int(float(sys.argv[5]) * (taken + state)))
settings = Settings(spool=spool, home=home, saver="auto")
with CheckpointCoordinator(root, settings=settings) as saves:
    if sys.argv[6]:
        saves.prewarm({"model": model, "optim": optimizer})
    for number in range(1, 9):
        step()
        saves.save(number, {"model": model, "optim": optimizer})
print("ended")
"""


@pytest.mark.parametrize("prewarms", ["", "prewarms"])
@pytest.mark.parametrize("times", [1.2, 0.9])
def test_a_training_ends_without_a_kill_or_says_at_once_what_it_lacks(
    job: Job, settings: Settings, group: Path, times: float, prewarms: str
) -> None:
    given = (group, job.root, settings.spool, settings.home, times, prewarms)
    program = Program(TRAINING, *given)
    try:
        said = program.end(0 if times > 1 else 1)
    finally:
        end_savers(settings.spool)
    newest = find_newest(job.root)
    assert "the images of this job need 40" in said, said
    assert f"The memory limit of {group} counts shared memory: raise it (--memory)" in said
    assert ("a save waits for the commit of the one before" in said) == (times > 1)
    assert (newest and newest.step, said.endswith("ended\n")) == (
        (8, True) if times > 1 else (None, False)
    )
