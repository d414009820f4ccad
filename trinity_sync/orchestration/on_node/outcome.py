"""What a function has returned or raised on a node, in a form that can always be pickled."""

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class RemoteTracebackError(Exception):
    """The traceback of an error in a Ray process, as text; the cause of an error without one."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a function has returned or raised in a Ray process."""

    result: T | None = None
    error: Exception | None = None
    cause: BaseException | None = None
    """Cause of the error, which pickling the error loses."""
    traceback: str = ""

    def get_error(self) -> Exception | None:
        """Return the error with its cause, or None."""
        if self.error and not self.error.__cause__:
            cause = self.cause
            # an I/O error has no other cause: tasks are retried by it
            if cause is None and self.traceback and not isinstance(self.error, OSError):
                cause = RemoteTracebackError(self.traceback)
            self.error.__cause__ = cause
        return self.error

    def unwrap(self) -> T:
        """Return the result.

        Raises:
            Exception: The error, with its cause.
        """
        if error := self.get_error():
            raise error
        return cast(T, self.result)


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
    """Call a function, and return its result or error in a form that can be pickled."""
    try:
        return Outcome(function(*args, **kwargs))
    except Exception as error:
        text = traceback.format_exc()
        failed: Outcome[T] = Outcome(error=error, cause=error.__cause__, traceback=text)
        try:
            pickle.loads(pickle.dumps(failed))
        except Exception:  # such as the errors of HTTP clients; what tasks look at is the class
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                return Outcome(error=RemoteTracebackError(text), traceback=text)
            return Outcome(error=error, traceback=text)
        return failed
