"""Work that succeeds on all ranks of the default process group, or raises on all of them.

A rank that reads a corrupted file must not be the only one to know, while the others wait in the
next collective. So the ranks tell each other how it went, and all raise or none does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from trinity_sync.errors import CommitError, TrinitySyncError

T = TypeVar("T")


def run_on_all_ranks(what: Path, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank, to find or to load a checkpoint; a collective call.

    Args:
        what: what is loaded, for messages.
        work: must not call collectives that other ranks do not reach when it fails.

    Raises:
        TrinitySyncError: on all ranks: the error of the first rank on which it failed.
        CommitError: likewise, where that was no `TrinitySyncError`.
    """
    mine: TrinitySyncError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except TrinitySyncError as error:
        mine = cause = error
    except Exception as error:
        cause = error
        mine = CommitError(
            f"{what} cannot be loaded by rank {dist.get_rank()}: {error!r}. Repair it, or load "
            "another step."
        )
    errors: list[TrinitySyncError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    for rank, theirs in enumerate(errors):
        if theirs is not None:
            first = mine if mine is not None and rank == dist.get_rank() else theirs
            raise first from (cause if cause is not first else None)
    return result


def broadcast_from_rank_0(what: Path, work: Callable[[], T]) -> T:
    """Return on every rank what ``work`` returns on rank 0; raises as `run_on_all_ranks`."""
    found = run_on_all_ranks(what, lambda: work() if dist.get_rank() == 0 else None)
    result = [found]
    dist.broadcast_object_list(result, src=0)
    return cast(T, result[0])
