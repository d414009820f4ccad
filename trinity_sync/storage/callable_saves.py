"""Saves by a user's callable: wait for their status, and list the files that they wrote."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import MissingShardsError, SaveError
from trinity_sync.fs.changes import lengthen_pauses
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.layout import is_below
from trinity_sync.snapshot.callable_status import CallableStatus, read_statuses
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.manifest_files import FileRecord


def await_callable_saves(
    spool: JobSpool,
    save: SaveId,
    *,
    at_least: int = 0,
    rank_timeout_s: float = 60.0,
) -> list[CallableStatus]:
    """Wait until the callable saves of this node have ended, and return their statuses.

    Their start is awaited for ``rank_timeout_s``, their end without a limit.

    Raises:
        SaveError: a callable failed, or its process died.
        MissingShardsError: fewer than ``at_least`` started within ``rank_timeout_s``.
    """
    deadline = time.monotonic() + rank_timeout_s
    pauses = lengthen_pauses()
    while True:
        statuses = list(read_statuses(spool, save.run, save.step, save.kind))
        for status in statuses:
            if status.state == "failed":
                raise SaveError(
                    f"{save} is not committed: the callable save {status.name!r} of rank "
                    f"{status.rank} failed: {status.error}"
                )
        if len(statuses) >= at_least and all(r.state == "finished" for r in statuses):
            return statuses
        if len(statuses) < at_least and time.monotonic() >= deadline:
            raise MissingShardsError(
                f"{save} is not committed: {at_least} callable saves were registered and "
                f"{len(statuses)} started within {rank_timeout_s:g} s"
            )
        time.sleep(next(pauses))


def sync_callable_files(save: SaveId, statuses: Sequence[CallableStatus]) -> None:
    """Sync the files that callables wrote on this node, which may still be in its page cache."""
    for name in {name for status in statuses for name in status.files}:
        with suppress(FileNotFoundError), (save.folder / name).open("rb") as file:
            os.fsync(file.fileno())  # the commit reports files that are missing


def list_callable_files(
    save: SaveId,
    statuses: Sequence[CallableStatus],
    written: set[str],
    committed: Mapping[str, FileRecord],
) -> Iterator[FileRecord]:
    """Yield records of the files that callables wrote on any node, digested and synced.

    The files in ``written`` are left out, and the images in ``committed``, which this run has
    committed of the step: the list of a callable has every file that changed while it ran,
    including shards of a sync that was committed meanwhile.

    Raises:
        SaveError: a file is missing, outside of the step's folder, or was committed with other
            content.
    """
    images = {path for path, record in committed.items() if record.images}
    found = {name for status in statuses for name in status.files}
    for name in sorted(found - written - images):
        path = save.folder / name
        if not is_below(name) or not path.resolve().is_relative_to(save.folder.resolve()):
            raise SaveError(f"{save}: {path} of a callable save is outside of the step's folder")
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            digest = digest_cached_file(path)
            nbytes = path.stat().st_size
        except FileNotFoundError as error:
            raise SaveError(
                f"{save}: {path} of a callable save is missing on the node of the commit. Check "
                "whether something removed it, or the root is another disk on the node where the "
                "callable ran."
            ) from error
        if name in committed and committed[name].digest != digest:
            raise SaveError(
                f"{save} is not committed: its save function has changed {path}, which run "
                f"{save.run} had committed with that step. Write other content to another file."
            )
        yield FileRecord(path=name, nbytes=nbytes, digest=digest, role=Path(name).parts[0])
