"""Threads that read the roots of jobs: a file system that hangs holds up no other job.

A call that hangs in the kernel cannot be ended. So each call has a thread of its own, which nothing
waits for when the process ends: threads of a pool, such as the event loop's own, would be used up.
Callers bound their number: a flow run makes one call at a time, a round over all roots one a root.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

OTHERS_WAIT_S = 60.0
"""Seconds for which maintenance of one root delays that of the next."""

P = ParamSpec("P")
R = TypeVar("R")


def start_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call a function in a daemon thread of its own, in the caller's context."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled from now on
    call = partial(copy_context().run, function, *args, **kwargs)

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="one-call", daemon=True).start()
    return future


async def run_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Await a function that `start_thread` calls; if this is cancelled, the call goes on."""
    return await asyncio.wrap_future(start_thread(function, *args, **kwargs))


class RootVisits:
    """Rounds over the roots of several jobs; one that hangs is left out until it answers.

    It is logged once, and again when it answers. ``purpose`` names the rounds in the log.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._hanging: dict[Path, Future[object]] = {}

    def visit(
        self,
        roots: Iterable[Path],
        function: Callable[[Path], R],
        *,
        each_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> dict[Path, R]:
        """Call a function for each root, and return the results of those that answered.

        Each call has a thread of its own. A root delays the visit of the next one for at most
        ``each_s``; 0 visits all at once. ``limit_s`` is the wait for all once the last one is
        visited.

        Raises:
            Exception: The first error of a call, once all are done or given up.
        """
        visits: dict[Path, Future[R]] = {}
        for root in roots:
            if root in self._hanging:
                if not self._hanging[root].done():
                    continue
                del self._hanging[root]
                logger.warning("%s answers again (%s)", root, self._purpose)
            visits[root] = start_thread(function, root)
            wait([visits[root]], each_s)
        deadline = time.monotonic() + limit_s
        found: dict[Path, R] = {}
        first: BaseException | None = None
        for root, visit in visits.items():
            wait([visit], None if math.isinf(limit_s) else max(0.0, deadline - time.monotonic()))
            if visit.done():
                if error := visit.exception():
                    first = first or error
                else:
                    found[root] = visit.result()
                continue
            self._hanging[root] = visit  # type: ignore[assignment]
            logger.warning(
                "%s has not answered within %.0f s (%s); it is left out until it does, other jobs "
                "are unaffected. Check its file system.",
                root,
                each_s + limit_s,
                self._purpose,
            )
        if first:
            raise first
        return found
