"""What a trainer does with the seconds between a signal and its end.

The signal's handler notes the time and nothing else; the training loop asks between two steps.
Then the weights go first, as a sync of their own, and the rest after them: the two add up to one
checkpoint, and if time runs out in between, the weights are what is left.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, SaveTimeoutError, TrinitySyncError
from trinity_sync.layout import Kind

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class LastWords:
    """What became of the last save of a process that is to end."""

    step: int
    handed_over: tuple[str, ...]
    """Components that are sealed in the spool; they survive the process, not the machine."""
    committed: tuple[Kind, ...]
    """What the step is good for now: nothing, the weights (``state_dict``), or all of it."""
    undone: tuple[str, ...]
    """A sentence for all that did not get done, and for earlier saves that have failed."""


def say_last_words(
    step: int,
    components: Mapping[str, Any],
    deadline_s: float,
    *,
    kinds: Sequence[Kind] = ("state_dict", "checkpoint"),
    save: Callable[[Kind, Mapping[str, Any]], Sequence[str]],
    wait: Callable[[float], None],
    failures: Callable[[], Sequence[str]],
    committed: Callable[[], tuple[Kind, ...]],
) -> LastWords:
    """Hand over what fits into ``deadline_s`` seconds, and wait for its commit with what is left.

    Args:
        step: training step.
        components: state by component.
        deadline_s: seconds for all of it.
        kinds: saves of the step, in their order.
        save: stages and hands over; returns the components that are sealed, or raises.
        wait: waits so many seconds for all saves, and raises what `wait_all` does.
        failures: earlier saves that failed and that ``wait``, out of time, did not raise.
        committed: what is committed of the step.
    """
    deadline = time.monotonic() + deadline_s
    weights = {name: state for name, state in components.items() if name == "model"}
    turns: list[tuple[Kind, Mapping[str, Any]]] = [
        (kind, weights if kind == "state_dict" else components)
        for kind in kinds
        if kind == "checkpoint" or (weights and len(components) > 1)
    ]
    sealed: list[str] = []
    undone: list[str] = []
    for kind, states in turns:
        new = [name for name in states if name not in sealed]
        if time.monotonic() >= deadline:
            undone.append(f"{', '.join(new)}: not handed over, the {deadline_s:g} s were over")
            break
        try:
            found = save(kind, states)
        except Exception as error:
            undone.append(f"{', '.join(new)}: not handed over, {_said(error)}")
            break
        sealed += [name for name in found if name not in sealed]
    try:
        wait(max(0.0, deadline - time.monotonic()))
    except SaveTimeoutError as error:
        undone += [f"{error} Until then the images wait in the spool of this node.", *failures()]
    except Exception as error:
        undone.append(_said(error))
    words = LastWords(step, tuple(sealed), committed(), tuple(undone))
    logger.warning(
        "last words at step %s: %s handed over, committed as %s%s",
        step,
        ", ".join(sealed) or "nothing",
        " and ".join(words.committed) or "nothing",
        "".join(f"; {sentence}" for sentence in undone),
    )
    return words


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, TrinitySyncError) else f"{type(error).__name__}: {error}"
