"""Hold back the handlers of signals while a change must not be interrupted.

Python calls a signal's handler in the main thread between two of its instructions. So the error
that a handler raises, such as PyTorch's when a DataLoader's worker is killed, or the save that it
makes, would come in the middle of another save.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def hold_handlers() -> Iterator[None]:
    """Call the handlers of signals that come within the block after it, where they may raise.

    A handler with ``is_harmless`` is called at once: it raises nothing and saves nothing. Handlers
    interrupt the main thread only; in others this does nothing.
    """
    global _held
    if threading.current_thread() is not threading.main_thread():
        yield
    elif _held and _held.is_own:
        _held.depth += 1
        try:
            yield
        finally:
            _held.depth -= 1
    else:
        hold = _Hold()
        try:
            hold.replace_handlers()
            _held = hold
            yield
        except _HandlerError as error:
            raise error.of_handler from None
        finally:
            _held = None
            try:
                hold.restore_handlers()
            finally:
                hold.call_handlers()


def call_held_handlers() -> None:
    """Call the handlers that are held back, in a wait; an error of theirs ends the whole block.

    It does nothing within two blocks: the outer one does not expect to be ended.
    """
    if threading.current_thread() is threading.main_thread() and _held and not _held.depth:
        try:
            _held.call_handlers()
        except Exception as error:
            raise _HandlerError(error) from None


class _HandlerError(BaseException):
    """An error of a handler, which is not one of the block, on its way through it."""

    def __init__(self, of_handler: Exception) -> None:
        super().__init__(of_handler)
        self.of_handler = of_handler


class _Hold:
    """A handler that takes the place of all others, and notes which signals come."""

    def __init__(self) -> None:
        self.depth = 0
        """Blocks within the first one."""
        self._process = os.getpid()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._replaced: list[int] = []
        self._came: list[int] = []

    @property
    def is_own(self) -> bool:
        """Whether this is not a child that another thread has forked."""
        return self._process == os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_own:
            self._came.append(signum)
        else:
            self._handlers[signum](signum, frame)

    def replace_handlers(self) -> None:
        for signum in signal.valid_signals():
            handler = signal.getsignal(signum)
            if callable(handler) and not getattr(handler, "is_harmless", False):
                self._handlers[signum] = handler
                self._replaced.append(signum)
                signal.signal(signum, self)

    def restore_handlers(self) -> None:
        """Restore all handlers, whatever those that are restored already raise meanwhile."""
        raised: BaseException | None = None
        while self._replaced:
            try:
                while self._replaced:
                    signum = self._replaced[-1]
                    handler = self._handlers[signum]
                    if signal.getsignal(signum) is self:  # not if a handler has set another one
                        signal.signal(signum, handler)
                    self._replaced.pop()
            except BaseException as error:
                raised = error
        if raised:
            raise raised

    def call_handlers(self) -> None:
        """Call the handlers of all signals that came; the last error of them is raised."""
        with ExitStack() as calls:
            while self._came:
                signum = self._came.pop()
                calls.callback(self._handlers[signum], signum, None)


_held: _Hold | None = None
