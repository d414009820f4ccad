"""Write permits: which shards may be written at the same time (``write_concurrency`` of the job).

A permit is a kernel lock on an empty file. It ends with the block or with the process, so a failed
save never blocks later ones, and no server is needed. Writers are not ordered: the kernel decides
which of them acquires a free permit.

::

    root/.trinity_sync/writing.lock       one: one shard of the job, on any node
    spool/writing.lock                    per_node: one shard on this node, of any job of a user
    spool/{job}/writing.rank{R}.lock      per_rank: one shard of each rank

The first needs a shared file system whose locks reach other nodes, as commits do.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import Ticket


@contextmanager
def acquire_write_permit(spool: JobSpool, ticket: Ticket) -> Iterator[None]:
    """Hold the write permit of an image within the block; wait for it without a limit.

    A warning names the process that holds it from time to time.
    """
    path = write_permit_path(spool, ticket)
    with acquire_file_lock(path, limit_s=math.inf) if path else nullcontext():
        yield


def write_permit_path(spool: JobSpool, ticket: Ticket) -> Path | None:
    """Return the path of the lock file of an image's write permit; None if it needs no permit."""
    name = "writing.lock"
    match ticket.write_concurrency:
        case "one":
            return Path(ticket.root) / PRIVATE_FOLDER / name
        case "per_node":
            return spool.folder.parent / name
        case "per_rank":
            return spool.folder / f"writing.rank{ticket.rank}.lock"
        case _:
            return None
