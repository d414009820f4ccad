"""Saves by a user's own functions: wait for their receipts, and for their files to be durable."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import (
    MissingShardsError,
    SaveError,
)
from trinity_sync.fs.direct_io import digest_of
from trinity_sync.layout import (
    is_below,
)
from trinity_sync.snapshot.callable_status import CallableStatus, read_statuses
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.manifest import (
    FileRecord,
)


def await_receipts(
    spool: JobSpool,
    save: SaveId,
    *,
    at_least: int = 0,
    gather_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> list[CallableStatus]:
    """Wait until the save's functions have ended, and for ``at_least`` of them to have begun.

    Raises:
        SaveError: one of them failed, or its process died.
        MissingShardsError: fewer than ``at_least`` began within ``gather_s`` seconds.
    """
    deadline = clock() + gather_s
    while True:
        receipts = list(read_statuses(spool, save.run, save.step, save.kind))
        for receipt in receipts:
            if receipt.state == "failed":
                raise SaveError(
                    f"{save} is not committed: the save function {receipt.name!r} of rank "
                    f"{receipt.rank} failed: {receipt.error}"
                )
        if len(receipts) >= at_least and all(r.state == "finished" for r in receipts):
            return receipts
        if len(receipts) < at_least and clock() >= deadline:
            raise MissingShardsError(
                f"{save} is not committed: {at_least} saves by functions were registered and "
                f"{len(receipts)} begun within {gather_s:g} s"
            )
        time.sleep(0.02)


def sync_function_files(save: SaveId, receipts: Sequence[CallableStatus]) -> None:
    """Sync the files that save functions wrote on this node, whose page cache may have them.

    Args:
        save: which one.
        receipts: of its functions on this node.
    """
    for name in {name for receipt in receipts for name in receipt.files}:
        with suppress(FileNotFoundError), (save.folder / name).open("rb") as file:
            os.fsync(file.fileno())  # one that has vanished is named by the commit


def list_function_files(
    save: SaveId, receipts: Sequence[CallableStatus], named: set[str]
) -> Iterator[FileRecord]:
    """Yield the files that save functions wrote, digested and synced.

    Args:
        save: which one.
        receipts: of its functions on all nodes.
        named: files to leave out: a function's list has all that changed while it ran, and so also
            the shards of a sync that was committed meanwhile.

    Raises:
        SaveError: a file is gone, or outside of the step's folder.
    """
    for name in sorted({name for receipt in receipts for name in receipt.files} - named):
        path = save.folder / name
        if not is_below(name) or not path.resolve().is_relative_to(save.folder.resolve()):
            raise SaveError(f"{save}: {path}, of a save function, is outside of the step's folder")
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            digest = digest_of(path)
            nbytes = path.stat().st_size
        except FileNotFoundError as error:
            raise SaveError(
                f"{save}: {path}, of a save function, is not in the root as the node of the commit "
                "sees it. Did something remove it, or is the root another disk on the node where "
                "the function ran?"
            ) from error
        yield FileRecord(path=name, nbytes=nbytes, digest=digest, role=Path(name).parts[0])
