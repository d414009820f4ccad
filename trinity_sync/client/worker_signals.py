"""Keep the workers of a DataLoader alive when a signal reaches all processes of a training.

Slurm, shells and launchers signal whole groups of processes. A worker that ends takes the batches
that it has prepared with it, and the loader raises an error before the trainer can save. So workers
that start after `keep_workers_alive` end at the signal only if the trainer sends it, as
``Process.terminate`` does.

The signal is blocked in such a worker, and in the programs that it starts: these need SIGKILL.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

_signals: list[int] = []
"""Signals to outlive, once for each call of `keep_workers_alive`."""
_start_process = BaseProcess.start


def keep_workers_alive(signum: int) -> Callable[[], None]:
    """Have workers of DataLoaders that start from now on outlive a signal.

    The returned function ends this for workers that start after its call.
    """
    _signals.append(signum)
    BaseProcess.start = _start  # type: ignore[method-assign,assignment]
    return lambda: _signals.remove(signum)


def _start(process: Any) -> None:
    """Start a process; torch's and torchdata's loaders have no other name than this in common."""
    loop = process._target
    if not _signals or getattr(loop, "__name__", "") != "_worker_loop":
        _start_process(process)
        return
    process._target = _Worker(loop, frozenset(_signals), os.getpid())
    method = process._start_method or multiprocessing.get_start_method()
    # inherited, so that none comes before the worker can look at it; a fork server would keep it
    inherited = () if method == "forkserver" else _signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, inherited)
    try:
        _start_process(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Worker:
    """The main function of a worker.

    A Python handler would not know the sender of a signal, and torch replaces that of SIGTERM.
    """

    loop: Callable[..., None]
    signals: frozenset[int]
    trainer: int

    def __call__(self, *arguments: Any, **options: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(target=self._wait, name="preemption-notice", daemon=True).start()
        self.loop(*arguments, **options)

    def _wait(self) -> None:
        while signal.sigwaitinfo(self.signals).si_pid != self.trainer:
            pass
        os._exit(0)  # as torch's handler of SIGTERM
