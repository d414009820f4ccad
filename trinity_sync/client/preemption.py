"""Handle the signal by which a scheduler announces the end of a trainer's process.

The handler only records the time; the training loop checks it between two steps. Where the signal
reaches the workers of a DataLoader as well, they stay alive, and the death of others that PyTorch's
handler of SIGCHLD would raise is logged.
"""

import logging
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

from trinity_sync.client.worker_signals import keep_workers_alive
from trinity_sync.errors import ConfigError

logger = logging.getLogger(__name__)


class Preemption:
    """Whether and when this process received the signal."""

    def __init__(self) -> None:
        self._noticed_at: float | None = None
        self._grace_s = 30.0
        self._handlers: list[_Handler] = []
        self._release_workers: list[Callable[[], None]] = []

    @property
    def noticed(self) -> bool:
        """Whether this process has received the signal."""
        return self._noticed_at is not None

    @property
    def left_s(self) -> float:
        """Seconds left until the process is killed."""
        since = 0.0 if self._noticed_at is None else time.monotonic() - self._noticed_at
        return max(0.0, self._grace_s - since)

    def notice(self, signum: int, grace_s: float) -> None:
        """Install a handler that records a signal, in the place of the earlier handler.

        The process is killed ``grace_s`` seconds after the signal. In forked children, the earlier
        handler is called. Workers of a DataLoader that start afterwards outlive the signal.

        Raises:
            ConfigError: this is not the main thread, or the signal cannot be caught.
        """

        def record() -> None:
            if self._noticed_at is None:
                self._noticed_at = time.monotonic()
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
    """Return whether any rank of the default process group has received the signal; collective."""
    if not dist.is_initialized():
        return noticed
    on_cpu = "gloo" in dist.get_backend_config()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    flag = torch.tensor(int(noticed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
