"""Preemption: the end of a trainer's process, by a signal or a time limit, and the save before it.

The handler of the signal only records the time; the training loop checks it between two steps, and
whether another step would leave enough of the time limit for a save. Where the signal reaches the
workers of a DataLoader as well, they stay alive, and the death of others that PyTorch's handler of
SIGCHLD would raise is logged.

Slurm, shells and launchers signal whole groups of processes. A worker that ends takes the batches
that it has prepared with it, and the loader raises an error before the trainer can save. So workers
that start after `keep_workers_alive` end at the signal only if the trainer sends it, as
``Process.terminate`` does.

The signal is blocked in such a worker, and in the programs that it starts: these need SIGKILL.

An emergency save has the seconds that are left. The weights are saved first, as a sync of the step,
and the other components after them. Together they are one checkpoint; if time runs out in between,
the weights are saved.
"""

import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, SaveTimeoutError, describe_error
from trinity_sync.fs.process import hold_handlers
from trinity_sync.layout import Kind, parse_number

logger = logging.getLogger(__name__)


class Preemption:
    """Whether and when this process ends: at a signal, or a time limit (see `_find_time_limit`).

    The ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self, save_by: timedelta = timedelta(0), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._has_signal = False
        self._grace_s = 30.0
        self._ends_at = clock() + _find_time_limit(save_by)
        """When this process is killed."""
        self._longest_s = 0.0
        """The longest time between two checks, which is that of a step."""
        self._checked_at = math.inf
        self._has_logged = False
        self._handlers: list[_Handler] = []
        self._release_workers: list[Callable[[], None]] = []

    @property
    def noticed(self) -> bool:
        """Whether the signal has come, or another step would end too late for a save."""
        return self._has_signal or self._longest_s + self._grace_s >= self._remaining_s

    @property
    def left_s(self) -> float:
        """Seconds left for an emergency save."""
        return max(0.0, min(self._grace_s, self._remaining_s))

    @property
    def _remaining_s(self) -> float:
        return self._ends_at - self._clock()

    def check(self) -> bool:
        """Return `noticed`, between two steps; log once that the reason is a time limit."""
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._checked_at)
        self._checked_at = now
        if self.noticed and not self._has_signal and not self._has_logged:
            self._has_logged = True
            logger.warning(
                "The time limit of this process is in %.0f s, too soon for another step (at most "
                "%.0f s so far) and %g s for an emergency save",
                self._remaining_s,
                self._longest_s,
                self._grace_s,
            )
        return self.noticed

    def notice(self, signum: int, grace_s: float) -> None:
        """Install a handler that records a signal, in the place of the earlier handler.

        The process is killed ``grace_s`` seconds after the signal. In forked children, the earlier
        handler is called. Workers of a DataLoader that start afterwards outlive the signal.

        Raises:
            ConfigError: this is not the main thread, or the signal cannot be caught.
        """

        def record() -> None:
            if not self._has_signal:
                self._has_signal = True
                self._ends_at = min(self._ends_at, self._clock() + grace_s)
                self._log_dead_children()

        try:
            handler = _Handler(signum, record)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"cannot handle signal {signum} here: {error}. Call on_preemption in the main "
                "thread, with a signal that can be caught, such as SIGTERM or SIGUSR1."
            ) from error
        self._grace_s = grace_s
        self._handlers.append(handler)
        self._release_workers.append(keep_workers_alive(signum))

    def _log_dead_children(self) -> None:
        """Log what handlers of SIGCHLD raise from now on: children end at the signal, too."""

        def call_earlier() -> None:
            if callable(earlier := _Handler.first_alive(handler.before)):
                try:
                    earlier(signal.SIGCHLD, None)
                except Exception as error:
                    _log_dead_child(error)

        while True:
            try:
                handler = _Handler(signal.SIGCHLD, call_earlier)
            except Exception as error:  # of the earlier handler, which was about to be called
                _log_dead_child(error)
            else:
                self._handlers.append(handler)
                return

    def restore_handlers(self) -> None:
        """Restore the earlier handlers of signals that still have this one's."""
        while self._release_workers:
            self._release_workers.pop()()
        while self._handlers:
            handler = self._handlers.pop()
            handler.ended = True
            with suppress(ValueError):  # not the main thread
                _restore(handler.signum)


def _find_time_limit(save_by: timedelta) -> float:
    """Return the seconds until this process is ``save_by`` old or its job ends, or infinity."""
    import psutil  # takes 8 ms, so not when the client is imported

    now = time.time()
    ends = [psutil.Process().create_time() + save_by.total_seconds()] if save_by else []
    end = parse_number(os.environ.get("SLURM_JOB_END_TIME", ""))
    if end is not None and end > now:  # otherwise the limit was extended
        ends.append(end)
    return min(ends, default=math.inf) - now


class _Handler:
    """A signal handler that takes the place of the earlier one until it has ended.

    Raises:
        ValueError, OSError: as in ``signal.signal``.
    """

    installed: ClassVar[set[int]] = set()
    """Signals for which this process has ever installed a handler."""

    def __init__(self, signum: int, on_signal: Callable[[], None]) -> None:
        self.signum = signum
        self.ended = False
        self._on_signal = on_signal
        self._process = os.getpid()
        self.before = signal.getsignal(signum)
        signal.signal(signum, self)
        self.installed.add(signum)

    @property
    def alive(self) -> bool:
        """Whether it handles the signal: it has not ended, and this is not a forked child."""
        return not self.ended and self._process == os.getpid()

    is_harmless = alive  # see `hold_handlers`

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.alive:
            self._on_signal()
        elif callable(before := _Handler.first_alive(self.before)):
            before(signum, frame)
        elif before != signal.SIG_IGN:  # called by a later handler, which stays installed
            now = signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            signal.signal(signum, now)

    @staticmethod
    def first_alive(handler: Any) -> Any:
        """Return the newest handler in the chain that has not ended."""
        while isinstance(handler, _Handler) and not handler.alive:
            handler = handler.before
        return signal.SIG_DFL if handler is None else handler


def _log_dead_child(error: Exception) -> None:
    with suppress(RuntimeError):  # the handler has interrupted a write to the same stream
        logger.warning("A child process died after the signal of the preemption: %s", error)


def _restore(signum: int) -> None:
    now = signal.getsignal(signum)
    if isinstance(now, _Handler):
        signal.signal(signum, _Handler.first_alive(now))


_forking = threading.local()


def _block_signals() -> None:
    """Block the signals, so that a child gets none before its handlers are restored."""
    signals = _Handler.installed
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if signals else None


def _unblock_signals() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    for signum in _Handler.installed:
        _restore(signum)
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_in_child
)


def noticed_by_any(noticed: bool) -> bool:
    """Return whether any rank of the default process group has noticed its end; collective."""
    if not dist.is_initialized():
        return noticed
    on_cpu = "gloo" in dist.get_backend_config()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    flag = torch.tensor(int(noticed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


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


@dataclass(frozen=True)
class EmergencySave:
    """The result of an emergency save."""

    step: int
    submitted: tuple[str, ...]
    """Components that are sealed in the spool; they survive the process, but not the machine."""
    committed: tuple[Kind, ...]
    """Kinds that are committed: none, the weights (``state_dict``), or ``checkpoint`` as well."""
    undone: tuple[str, ...]
    """A sentence for each component that was not saved and each earlier save that failed."""


def run_emergency_save(
    step: int,
    components: Mapping[str, Any],
    deadline_s: float,
    *,
    kinds: Sequence[Kind] = ("state_dict", "checkpoint"),
    save: Callable[[Kind, Mapping[str, Any]], Sequence[str]],
    wait: Callable[[float], None],
    failures: Callable[[], Sequence[str]],
    committed: Callable[[], tuple[Kind, ...]],
) -> EmergencySave:
    """Submit what fits into the time that is left, then wait for the commit until the deadline.

    ``deadline_s`` is for staging and commit together; ``kinds`` are saved in their order. ``save``
    stages and submits, and returns the sealed components, or raises. ``wait`` waits at most the
    given seconds for all saves, and raises as `wait_all`; ``failures`` returns those of earlier
    saves that it has not raised.
    """
    deadline = time.monotonic() + deadline_s
    weights = {name: state for name, state in components.items() if name == "model"}
    saves: list[tuple[Kind, Mapping[str, Any]]] = [
        (kind, weights if kind == "state_dict" else components)
        for kind in kinds
        if kind == "checkpoint" or (weights and len(components) > 1)
    ]
    sealed: list[str] = []
    undone: list[str] = []
    try:
        with hold_handlers():
            for kind, states in saves:
                new = [name for name in states if name not in sealed]
                if time.monotonic() >= deadline:
                    undone.append(
                        f"{', '.join(new)}: not submitted, the {deadline_s:g} s were over"
                    )
                    break
                try:
                    found = save(kind, states)
                except Exception as error:
                    undone.append(f"{', '.join(new)}: not submitted, {describe_error(error)}")
                    break
                sealed += [name for name in found if name not in sealed]
    except Exception as error:
        logger.warning("A signal's handler raised an error in an emergency save: %s", error)
    try:
        wait(max(0.0, deadline - time.monotonic()))
    except SaveTimeoutError as error:
        undone += [f"{error} Until then the images wait in the spool of this node.", *failures()]
    except Exception as error:
        undone.append(describe_error(error))
    done = EmergencySave(step, tuple(sealed), committed(), tuple(undone))
    logger.warning(
        "Emergency save of step %s: %s submitted, committed as %s%s",
        step,
        ", ".join(sealed) or "nothing",
        " and ".join(done.committed) or "nothing",
        "".join(f"; {sentence}" for sentence in undone),
    )
    return done
