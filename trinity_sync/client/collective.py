"""Run work that succeeds on all ranks of the default process group, or raises on all of them.

If only the rank that reads a corrupted file raised, the others would hang in the next collective.
So the ranks exchange their errors, and all of them raise or none does. Without a process group
there is one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from trinity_sync.errors import CommitError, TrinitySyncError, describe_error
from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.manifest import FileRecord, Manifest
from trinity_sync.storage.restore import OpenFiles
from trinity_sync.storage.steps_in_use import lease_to_read

T = TypeVar("T")


def run_on_all_ranks(what: Path, work: Callable[[], T]) -> T:
    """Run a function on every rank, and return its result; a collective call.

    After an error the function must not leave other ranks in a collective. ``what`` is the path
    that is loaded, for messages.

    Raises:
        TrinitySyncError: on all ranks: the error of the first rank on which it failed.
        CommitError: likewise, if that error is not a `TrinitySyncError`.
    """
    if not _has_group():
        return work()
    mine: TrinitySyncError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except TrinitySyncError as error:
        mine = cause = error
    except Exception as error:
        cause = error
        mine = CommitError(
            f"{what} cannot be loaded or cut by rank {dist.get_rank()}: {describe_error(error)}. "
            "Repair it, or take another step."
        )
    for rank, theirs in enumerate(gather_from_ranks(mine)):
        if theirs is not None:
            first = mine if mine is not None and rank == dist.get_rank() else theirs
            raise first from (cause if cause is not first else None)
    return result


def gather_from_ranks(mine: T) -> list[T]:
    """Return what each rank passes, by rank; a collective call."""
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def broadcast_from_rank_0(what: Path, work: Callable[[], T]) -> T:
    """Return on every rank what a function returns on rank 0, which alone calls it; collective.

    Raises:
        TrinitySyncError: as in `run_on_all_ranks`.
    """
    if not _has_group():
        return work()
    found = run_on_all_ranks(what, lambda: work() if dist.get_rank() == 0 else None)
    result = [found]
    dist.broadcast_object_list(result, src=0)
    return cast(T, result[0])


@contextmanager
def lease_on_rank_0(root: Path, step: int) -> Iterator[Manifest]:
    """Lease a committed step for all ranks within the block, and yield its manifest.

    Rank 0 alone acquires the lease and looks at all files of the step, and tells the others. A
    rank looks at the files that it reads, and nothing else. Beginning and end of the block are
    collective calls: rank 0 leaves it when all ranks have read.

    Raises:
        TrinitySyncError: on all ranks: the step is not committed, or corrupted.
        CommitError: at the end of the block, on all ranks: another run has replaced the step.
    """
    folder = step_folder(root, step)
    with ExitStack() as leased:
        manifest = broadcast_from_rank_0(
            folder, lambda: leased.enter_context(lease_to_read(root, step, "load by all ranks"))
        )
        revalidate_folder(root)  # another node may have committed the step just now
        revalidate_folder(folder)
        yield manifest
        broadcast_from_rank_0(folder, lambda: require_unreplaced(root, manifest))


def open_on_all_ranks(
    root: Path, manifest: Manifest, records: Sequence[FileRecord], *, unpickled: bool
) -> OpenFiles:
    """Open files of a leased step on every rank, and compare them with their digests.

    Each rank compares a part of the files, for all ranks: then the step is still that of the
    manifest, so every rank has the same files open. A collective call if there is a process group.

    Raises:
        CommitError: on all ranks: a file is corrupted, cannot be read, or may be another user's and
            would be unpickled; or the step was replaced.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if _has_group() else (0, 1)
    folder, files = step_folder(root, manifest.step), OpenFiles(root, manifest)

    def check() -> None:
        files.open(records, unpickled=unpickled)
        files.compare(sorted(records, key=lambda record: record.nbytes)[rank::world_size])

    try:
        run_on_all_ranks(folder, check)
        broadcast_from_rank_0(folder, lambda: require_unreplaced(root, manifest))
    except BaseException:
        files.close()
        raise
    return files


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
