"""Savers of a spool, and trainers that die of SIGKILL."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.waiting import WAIT_S, until
from trinity_sync import Settings
from trinity_sync.fs.locks import LockFile

TRAINER = """
import os, signal, sys
import psutil, torch
from trinity_sync import CheckpointCoordinator

os.chdir(sys.argv[2])
sys.path.insert(0, sys.argv[2])
saves = CheckpointCoordinator(sys.argv[1])
start = saves.latest_step() or 0
if start:
    print(start, saves.load(start)["model"]["w"].unique().item(), flush=True)
class Ending:
    def __reduce__(self):  # called while it is staged
        end_saver()
        return int, ()
def end_saver():
    for saver in psutil.process_iter(["cmdline"]):
        if (saver.info["cmdline"] or [""])[3:4] == [str(saves.settings.spool)]:
            saver.kill()
            saver.wait()
for step in (start + 1, start + 2):
    optim = {"step": step}
    if step > 1 and "saver dies" in sys.argv:
        saves.wait_all(250)
        end_saver()
    if step > 1 and "saver dies in the save" in sys.argv:
        saves.wait_all(250)
        optim[""] = Ending()
        saves._watcher._start = lambda: None  # it is killed before the thread has run
    saves.save(step, {"model": {"w": torch.full((9,), float(step))}, "optim": optim})
os.kill(os.getpid(), signal.SIGKILL)
"""


def await_that(holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    until(holds, what, seconds, pause=0.01)


def is_announced(job: Job, step: int) -> bool:
    journals = (job.root / ".trinity_sync/journal").glob("*.jsonl")
    return any(f"/step{step}/" in each.read_text() for each in journals)


def savers_of(spool: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[2:4] == ["trinity_sync.saver", str(spool)]:
            found.append(process)
    return found


def suspend_saver(spool: Path) -> psutil.Process:
    """Suspend the saver of a spool once it has ended what it had begun; return its process."""
    await_that(lambda: not [*spool.glob("*/*.begun.json")], "the saver ends what it has begun")
    (saver,) = savers_of(spool)
    saver.suspend()
    return saver


def await_reaching() -> None:
    """Wait for threads that reach for a saver: they would start one, or keep it."""
    for thread in threading.enumerate():
        if thread.name == "commit-watcher":  # it may wait until its saver serves
            thread.join(60)
            assert not thread.is_alive(), "it would reach for a saver again"


def end_savers(spool: Path) -> None:
    """Kill the savers of a spool, and leave no thread that would start another one."""
    await_reaching()
    while savers := savers_of(spool):  # what one has just started has its command, or none yet
        for saver in savers:
            with suppress(psutil.NoSuchProcess):
                saver.kill()
        psutil.wait_procs(savers, 1)


def train(root: Path, settings: Settings, folder: Path, *arguments: str) -> str:
    """Run a trainer that resumes, saves two steps and dies of SIGKILL; return what it prints."""
    variables = {**os.environ, **settings.to_variables(), "PYTHONPATH": str(Path.cwd())}
    return Program(TRAINER, root, folder, *arguments, env=variables).end(-signal.SIGKILL)


def is_locked(path: Path) -> bool:
    """Whether a process holds the exclusive lock of a file, which is not created."""
    try:
        with closing(LockFile(path, os.O_RDONLY | os.O_NONBLOCK)) as lock:
            return not lock.try_acquire(shared=True)
    except FileNotFoundError:
        return False
