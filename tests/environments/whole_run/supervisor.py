"""Starts all processes of the run, kills them at random times, and starts what is to start again.

This process has imported what they need and runs no thread, so a process is a fork of it, at work
within a tenth of a second.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import psutil

from tests.environments.whole_run import controller, rollout_queue, rollout_worker, trainer
from tests.environments.whole_run.run import TRAINERS, WORKERS, Run
from tests.support.savers import savers_of

FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1

PROCESSES: dict[str, Callable[[Run], None]] = {
    **{f"trainer {rank}": partial(trainer.train, rank=rank) for rank in range(TRAINERS)},
    "controller": controller.control,
    "queue": rollout_queue.serve,
    **{f"rollout worker {n}": partial(rollout_worker.work, number=n) for n in range(WORKERS)},
}
SAVER, MACHINE = "saver", "machine with its spool"
KILLS = (*PROCESSES, SAVER, MACHINE)
STOPPED_S = 1.5 * controller.LATE_S
"""Seconds for which a rollout worker is stopped at times; another gets its prompts meanwhile."""
UNTIL_KILL_S, UNTIL_NOTICED_S = 6.0, 1.0
"""Longest times from a start to a kill, and from a kill to that of all other processes."""
UNTIL_STEP_S = 60.0


class FallenError(Exception):
    """A process has ended that was not killed, or the run is stuck."""


@dataclass
class Supervisor:
    """All starts of one run in a folder, killed by a random generator."""

    folder: Path
    spool: Path
    prompts: int
    random: Random
    starts: int = 0
    killed: Counter[str] = field(default_factory=Counter)

    def train(self, kills: int) -> None:
        """Train until all prompts are trained, with so many kills on the way.

        Raises:
            FallenError: a process has ended by itself, or the run does not end.
        """
        began, order = time.monotonic(), list[str]()
        run, processes = self._start()
        try:
            while kills and self._runs(processes, self.random.uniform(0, UNTIL_KILL_S)):
                if not order:
                    order = self.random.sample(KILLS, len(KILLS))
                    self._stop_for_a_while(processes, f"rollout worker {self.starts % WORKERS}")
                name, kills = order.pop(), kills - 1
                print(f"{time.monotonic() - began:5.0f} s  start {self.starts}: {name}", flush=True)
                self.killed[name] += 1
                if name == SAVER:
                    self._kill_savers()
                elif name.startswith("rollout worker"):
                    _kill([processes[name]])
                    processes[name] = _fork(run, name)
                else:
                    if name != MACHINE:  # the others go on as far as they can
                        _kill([processes[name]])
                        time.sleep(self.random.uniform(0, UNTIL_NOTICED_S))
                    _kill(processes.values())
                    if name == MACHINE:
                        self._kill_savers()
                        shutil.rmtree(self.spool)
                    run, processes = self._start()
            noted = -1
            while self._runs(processes, UNTIL_STEP_S):
                before, noted = noted, run.truth.stat().st_size
                if noted == before:
                    raise FallenError(f"no step within {UNTIL_STEP_S:.0f} s")
        finally:
            _kill(processes.values())
            self._kill_savers()

    def _start(self) -> tuple[Run, dict[str, BaseProcess]]:
        self.starts += 1
        key = f"{self.starts}-{uuid.uuid4().hex[:8]}"
        run = Run(self.folder, self.starts, key, self.prompts)
        run.own.mkdir()
        return run, {name: _fork(run, name) for name in PROCESSES}

    def _runs(self, processes: dict[str, BaseProcess], seconds: float) -> bool:
        """Wait for some seconds; return False once the trainer has ended."""
        deadline = time.monotonic() + seconds
        trainers = [process for name, process in processes.items() if name.startswith("trainer")]
        while not all(each.exitcode == 0 for each in trainers):
            if fallen := [name for name, each in processes.items() if each.exitcode]:
                said = (self.folder / f"start-{self.starts}/{fallen[0]}.log").read_text()[-3000:]
                raise FallenError(f"{fallen} of start {self.starts} ended by itself:\n{said}")
            if (left := deadline - time.monotonic()) <= 0:
                return True
            wait([each.sentinel for each in processes.values() if each.exitcode is None], left)
        return False

    def _stop_for_a_while(self, processes: dict[str, BaseProcess], worker: str) -> None:
        os.kill(processes[worker].ident, signal.SIGSTOP)
        self._runs(processes, STOPPED_S)
        os.kill(processes[worker].ident, signal.SIGCONT)

    def _kill_savers(self) -> None:
        """Kill all savers at once: one that waits for the other's end would begin its saves."""
        savers = savers_of(self.spool)
        for act in (psutil.Process.suspend, psutil.Process.kill, psutil.Process.wait):
            for saver in savers:
                with suppress(psutil.NoSuchProcess):
                    act(saver)


def _fork(run: Run, name: str) -> BaseProcess:
    process = FORK.Process(target=_enter, args=(run, name), name=name)
    process.start()
    return process


def _enter(run: Run, name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(run.own / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    PROCESSES[name](run)


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
