"""The lock of a flow run on a node: held while a worker of the node executes the run."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from trinity_sync.fs.locks import open_lock_file
from trinity_sync.snapshot.spool import make_own_folder


@contextmanager
def try_run_lock(spool: Path, run_id: UUID) -> Iterator[bool]:
    """Acquire the lock of a flow run on this node without waiting; yield whether it was free.

    The worker that executes a run holds its lock from before it takes the run until the run's end
    is reported, so a lock that is free means that no process of this node executes the run, and
    that none begins to within the block.

    Raises:
        SpoolError: the spool is not a folder of this user alone, or cannot be made.
    """
    make_own_folder(spool)
    with open_lock_file(spool / ".runs.lock") as lock:
        # one byte of one file for each run: unlike a file for each, a process that is killed
        # leaves nothing behind
        yield lock.try_acquire_range(fcntl.F_WRLCK, run_id.int % 2**62, 1)
