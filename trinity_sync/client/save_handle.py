"""`SaveHandle`, which a save returns."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_sync.errors import SaveFailedError
from trinity_sync.layout import check_seconds
from trinity_sync.snapshot.stager import Staged


@dataclass(frozen=True, kw_only=True)
class SaveHandle(Staged):
    """A save: what it has put into the spool, what it cost the caller, and whether it is committed.

    The save needs no handle: it commits without one, and `CheckpointCoordinator.wait_all` raises
    its failure as well.
    """

    wait_staged: Callable[[], object] = field(repr=False)
    """Waits until an overlapped save is submitted."""
    wait_committed: Callable[[float | None], str] = field(repr=False)
    """Waits until a deadline (monotonic), and returns why the save failed."""
    has_committed: Callable[[], bool] = field(repr=False)

    @property
    def committed(self) -> bool:
        """Whether the save is committed, which one small file of the root tells."""
        if self.submitted is not None and not self.submitted.done():
            return False
        return not self._find_failure() and self.has_committed()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is committed; any thread may call it.

        Args:
            timeout: seconds from when the save is staged; None for no limit.

        Raises:
            SaveFailedError: the save was not committed; the message says why.
            SaveTimeoutError: the time is over, or the coordinator was closed; the save may still
                commit.
            ConfigError: this process is a forked child.
        """
        self.wait_staged()
        if self.committed:
            return
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        failure = self._find_failure() or self.wait_committed(deadline)
        if failure:
            raise SaveFailedError(failure)

    def _find_failure(self) -> str:
        """Return why nothing was staged; empty if it was."""
        return self.submitted.result().failure if self.submitted else self.failure
