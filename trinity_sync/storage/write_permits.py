"""Whose turn it is to write a shard, where not all may write at once (Trinity's save strategies).

A turn is a lock of the kernel on an empty file. It ends with the process that has it, however that
dies, and with the block, whatever the file system raised there: a save that failed can never keep
later ones waiting. It needs no server, so saves go on while one is away. It is not for the order:
whoever the kernel wakes first writes first.

::

    root/.trinity_sync/writing.lock       single_thread: one shard of the job, on whatever node
    spool/writing.lock                    single_node: one on this node, of any job of this user
    spool/{job}/writing.rank{R}.lock      single_process: one of each rank, which is one process

The first needs a shared file system that carries locks from node to node, as commits do.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_sync.fs.locks import file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import Ticket


@contextmanager
def acquire_write_permit(spool: JobSpool, ticket: Ticket) -> Iterator[None]:
    """Wait until the strategy of an image's save lets it be written; others wait for the block.

    However many write first, it waits; every now and then a warning says for which process.

    Args:
        spool: of the job on this node.
        ticket: of the image.
    """
    path = write_permit_path(spool, ticket)
    if path is None:
        yield
        return
    with file_lock(path, limit_s=math.inf):
        yield


def write_permit_path(spool: JobSpool, ticket: Ticket) -> Path | None:
    """The file whose lock lets an image be written; None where it may be written at once."""
    name = "writing.lock"
    match ticket.strategy:
        case "single_thread":
            return Path(ticket.root) / PRIVATE_FOLDER / name
        case "single_node":
            return spool.folder.parent / name
        case "single_process":
            return spool.folder / f"writing.rank{ticket.rank}.lock"
        case _:
            return None
