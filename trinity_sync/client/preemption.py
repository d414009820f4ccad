"""The signal that announces the end of a trainer's process.

The handler records the time and nothing else; the training loop asks between two steps.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError


class Preemption:
    """Whether, and since when, this process is to end."""

    def __init__(self) -> None:
        self._noticed_at: float | None = None
        self._grace_s = 30.0
        self._handlers: list[_Handler] = []

    @property
    def noticed(self) -> bool:
        """Whether the signal has come."""
        return self._noticed_at is not None

    @property
    def left_s(self) -> float:
        """Seconds left of the time that the signal gave."""
        since = 0.0 if self._noticed_at is None else time.monotonic() - self._noticed_at
        return max(0.0, self._grace_s - since)

    def notice(self, signum: int, grace_s: float) -> None:
        """Take note of a signal from now on, in the place of what was done at it before.

        Only this process does: in a child that it forks the signal does what it did before.

        Raises:
            ConfigError: this is not the main thread, or the signal cannot be caught.
        """

        def note() -> None:
            self._noticed_at = self._noticed_at or time.monotonic()

        try:
            handler = _Handler(signum, note)
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"signal {signum} cannot be noticed here: {error}. Call on_preemption in the main "
                "thread, with a signal that can be caught, such as SIGTERM or SIGUSR1."
            ) from error
        self._grace_s = grace_s
        self._handlers.append(handler)

    def forget(self) -> None:
        """Have the signals do again what they did before, but where others handle them by now."""
        while self._handlers:
            handler = self._handlers.pop()
            handler.ended = True
            with suppress(ValueError):  # not the main thread
                _restore(handler.signum)


class _Handler:
    """Takes the place of what is done at a signal, until it has ended.

    Args:
        signum: of the signal.
        note: called when it comes.

    Raises:
        ValueError, OSError: as ``signal.signal``.
    """

    taken: ClassVar[set[int]] = set()
    """Signals of which there was ever one in this process."""

    def __init__(self, signum: int, note: Callable[[], None]) -> None:
        self.signum = signum
        self.ended = False
        self._note = note
        self._process = os.getpid()
        self.before = signal.getsignal(signum)
        signal.signal(signum, self)
        self.taken.add(signum)

    @property
    def alive(self) -> bool:
        """Whether it is to note the signal: not in a child that was forked."""
        return not self.ended and self._process == os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.alive:
            self._note()
        elif callable(before := _Handler.first_alive(self.before)):
            before(signum, frame)
        elif before != signal.SIG_IGN:  # called by a handler that has come since, and stays
            now = signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            signal.signal(signum, now)

    @staticmethod
    def first_alive(handler: Any) -> Any:
        """What is done at a signal once those that have ended are passed over."""
        while isinstance(handler, _Handler) and not handler.alive:
            handler = handler.before
        return signal.SIG_DFL if handler is None else handler


def _restore(signum: int) -> None:
    now = signal.getsignal(signum)
    if isinstance(now, _Handler):
        signal.signal(signum, _Handler.first_alive(now))


_forking = threading.local()


def _hold_signals_back() -> None:
    """Let none come in a child before it is dealt with as it was before."""
    taken = _Handler.taken
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken) if taken else None


def _let_signals_come() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    for signum in _Handler.taken:
        _restore(signum)
    _let_signals_come()


os.register_at_fork(
    before=_hold_signals_back, after_in_parent=_let_signals_come, after_in_child=_restore_in_child
)


def noticed_by_any(noticed: bool) -> bool:
    """Whether any rank of the default process group was told to end; all ask together."""
    if not dist.is_initialized():
        return noticed
    on_cpu = "gloo" in dist.get_backend_config()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    flag = torch.tensor(int(noticed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
