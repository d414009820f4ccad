"""What all ranks do or none: one that fails alone would leave the others waiting for it.

A rank that reads a corrupted file must not be the only one to know, while the others stand in the
next collective for ever. So they tell each other how it went, and all raise or none does.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.layout import split_role_path
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import Manifest

T = TypeVar("T")


def together(role_folder: Path, work: Callable[[], T]) -> T:
    """Do something on every rank of the default process group, to load a checkpoint.

    Args:
        role_folder: what is loaded, for messages.
        work: no rank may call collectives in it that others do not reach when it fails.

    Raises:
        TrinitySyncError: it failed on this rank, or else on another, whose error this is.
        CommitError: likewise, with an error that is none of ours.
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
            f"{role_folder} cannot be loaded by rank {dist.get_rank()}: {error!r}. Mend that, or "
            "load another step."
        )
    errors: list[TrinitySyncError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    if mine is not None:
        raise mine from (cause if cause is not mine else None)
    for theirs in errors:
        if theirs is not None:
            raise theirs
    return result


def told_by_rank_0(folder: Path, work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank of the default process group; raises as `together`."""
    found = together(folder, lambda: work() if dist.get_rank() == 0 else None)
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return cast(T, told[0])


def claim_step(role_folder: Path, claim: ExitStack) -> Manifest:
    """What is to be loaded; rank 0 claims it, too."""
    root, step, _ = split_role_path(role_folder)
    if dist.get_rank():
        return require_committed(root, step)
    return claim.enter_context(lease_to_read(root, step, "load by all ranks"))
