"""Save functions of the user: their status in the spool, the wait for them, and their files.

The status of a function is a small file in the spool that the step's commit waits for. It is
*started* before the function runs, and becomes *finished*, with the files that the function wrote,
or *failed*, with its error. If the process dies in between, a started status remains whose process
is gone; it counts as failed. The request of the save is kept next to it, since a save of
functions alone has no images by which a saver would find it.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trinity_sync.errors import MissingShardsError, SaveError, SpoolError
from trinity_sync.fs.atomic import (
    copy_links,
    lengthen_pauses,
    list_paths,
    open_no_follow,
    read_file,
    replace_file,
)
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.file_system import is_recent
from trinity_sync.fs.process import is_process_alive
from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import MANIFEST, Kind, check_name, is_below
from trinity_sync.snapshot.identity import SaveId, label_run
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.manifest import FileRecord

State = Literal["started", "finished", "failed"]


@dataclass(frozen=True)
class FunctionStatus(Record):
    """A call of a save function for a step."""

    name: str
    run: Count
    step: Count
    kind: Kind
    rank: Count
    process: str
    """``pid/start time`` of the process that runs the function, see `read_process_identity`."""
    state: State = "started"
    error: str = ""
    seconds: Seconds = 0.0
    files: tuple[str, ...] = ()
    """Paths below the step's folder that the function wrote."""
    run_key: str = ""

    @property
    def settled(self) -> "FunctionStatus":
        """This status, or a failed one if its process is gone before it has ended."""
        if self.state == "started" and not is_process_alive(self.process):
            return replace(self, state="failed", error="the process died before it had ended")
        return self


def write_status(spool: JobSpool, status: FunctionStatus) -> None:
    """Write a status, in the place of an earlier one of the same call; only a failure always is."""
    try:
        _replace(spool, _path(spool, status), encode_record(status))
    except OSError:  # neither memory nor a descriptor is free: a torn status needs none, and fails
        if status.state != "failed":
            raise
        with suppress(FileExistsError):
            os.mknod(_path(spool, status))
        os.truncate(_path(spool, status), 0)


def read_statuses(spool: JobSpool, save: SaveId) -> Iterator[FunctionStatus]:
    """Yield the statuses of a save's functions; those of processes that are gone are failed.

    Raises:
        SpoolError: a file is torn.
    """
    for path in _list_files(spool, save, "*.rank*"):
        try:
            status = decode_record(FunctionStatus, read_file(path), path)
            if path != _path(spool, status):
                raise ValueError("it belongs to another save")
        except FileNotFoundError:
            continue  # removed meanwhile
        except ValueError as error:
            raise SpoolError(
                f"receipt {path} of step {save.step} is torn, so the result of its save function "
                "is unknown and the step is not committed. Remove it; later saves are unaffected."
            ) from error
        yield status.settled


def has_running_functions(spool: JobSpool, save: SaveId, *, within_s: float) -> bool:
    """Return whether a function of a save runs on this node, or has ended within some seconds."""
    with suppress(FileNotFoundError):  # removed meanwhile
        now, paths = time.time(), _list_files(spool, save, "*.rank*")
        if any(is_recent(path.stat().st_mtime, now, within_s) for path in paths):
            return True
    return any(status.state == "started" for status in read_statuses(spool, save))


def remove_statuses(spool: JobSpool, save: SaveId) -> None:
    """Remove the statuses of a save whose commit lists them, and its request."""
    for path in _list_files(spool, save, "*"):
        path.unlink(missing_ok=True)


def write_request(spool: JobSpool, save: SaveId, request: str) -> None:
    """Keep the request (JSON) of a save of functions until it has ended."""
    _replace(spool, _request_path(spool, save), request)


def has_request(spool: JobSpool, save: SaveId) -> bool:
    """Return whether the request of a save of functions waits."""
    return _request_path(spool, save).exists()


def list_requests(spool: JobSpool) -> list[Path]:
    """Return the files of `write_request`."""
    return list_paths(spool.receipts, "*.request.json")


def remove_request(spool: JobSpool, save: SaveId) -> None:
    """Remove the request of a save that failed; the statuses stay for a retry."""
    _request_path(spool, save).unlink(missing_ok=True)


def _replace(spool: JobSpool, path: Path, content: str) -> None:
    spool.make()
    spool.receipts.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, content, sync=False)


def _request_path(spool: JobSpool, save: SaveId) -> Path:
    return spool.receipts / f"{_prefix(save)}.request.json"


def _path(spool: JobSpool, status: FunctionStatus) -> Path:
    name = check_name("name of a save", status.name)
    return spool.receipts / f"{_prefix(status)}.{name}.rank{status.rank}.json"


def _list_files(spool: JobSpool, save: SaveId, what: str) -> list[Path]:
    """Return files of a save; without its run key, those of any run that has had the number."""
    of_run = label_run(save) if save.run_key else f"run{save.run}-*"
    return list_paths(spool.receipts, f"{of_run}.{save.step}.{save.kind}.{what}.json")


def _prefix(of: SaveId | FunctionStatus) -> str:
    return f"{label_run(of)}.{of.step}.{of.kind}"


def await_save_functions(
    spool: JobSpool, save: SaveId, *, at_least: int = 0, rank_timeout_s: float = 60.0
) -> list[FunctionStatus]:
    """Wait until the save functions of this node have ended; return their statuses, files synced.

    Their start is awaited for ``rank_timeout_s``, their end without a limit.

    Raises:
        SaveError: a function failed, or its process died.
        MissingShardsError: fewer than ``at_least`` started within ``rank_timeout_s``.
        OSError: a file cannot be opened or copied; that may be repeated.
    """
    deadline = time.monotonic() + rank_timeout_s
    pauses = lengthen_pauses()
    while True:
        statuses = [*read_statuses(spool, save)]
        for status in statuses:
            if status.state == "failed":
                raise SaveError(
                    f"{save} is not committed: the save function {status.name!r} of rank "
                    f"{status.rank} failed: {status.error}"
                )
        ended = len(statuses) >= at_least and all(r.state == "finished" for r in statuses)
        if ended and all([_sync_files(spool, save, each) for each in statuses]):
            return statuses
        if len(statuses) < at_least and time.monotonic() >= deadline:
            raise MissingShardsError(
                f"{save} is not committed: {at_least} save functions were registered and "
                f"{len(statuses)} started within {rank_timeout_s:g} s"
            )
        time.sleep(next(pauses))


def _sync_files(spool: JobSpool, save: SaveId, status: FunctionStatus) -> bool:
    """Sync the files that a function wrote on this node; return whether all are durable.

    One with another name is replaced by a copy, since a write to that name would change the step.

    If not, it has failed until it is called again: the kernel reports no error to a retry.
    """
    for path in map(save.folder.joinpath, status.files):
        if path.is_symlink():  # the commit reports links, and files that are missing
            continue
        with suppress(FileNotFoundError), open_no_follow(path) as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                why = f"{path} cannot be written: {error.strerror}"
                write_status(spool, replace(status, state="failed", error=why))
                return False
            if os.fstat(file.fileno()).st_nlink > 1:
                copy_links(path)
    return True


def list_function_files(
    save: SaveId,
    statuses: Sequence[FunctionStatus],
    written: set[str],
    committed: Mapping[str, FileRecord],
) -> Iterator[FileRecord]:
    """Yield records of the files that functions wrote on any node, and have synced, digested.

    The files in ``written`` are left out, and the images in ``committed``, which this run has
    committed of the step: the list of a function has every file that changed while it ran,
    including shards of a sync that was committed meanwhile.

    Raises:
        SaveError: a file is missing, a link, outside of the step's folder, or was committed with
            other content.
    """
    found = {name for status in statuses for name in status.files}
    for name in sorted(found - written):
        path, known = save.folder / name, committed.get(name)
        is_outside = not is_below(name) or not path.resolve().is_relative_to(save.folder.resolve())
        if is_outside or path.is_symlink():
            raise SaveError(f"{save}: {path} of a save function is a link or outside of its folder")
        try:
            seen = path.lstat()
            committed_at = (save.folder / MANIFEST).stat().st_ctime_ns if known else 0
            if known and known.images and seen.st_ctime_ns < committed_at:
                continue  # it was committed meanwhile, and not changed since
            digest = digest_cached_file(path)
        except FileNotFoundError as error:
            raise SaveError(
                f"{save}: {path} of a save function is missing on the node of the commit. Check "
                "whether something removed it, or the root is another disk on the node where the "
                "function ran."
            ) from error
        if known and known.digest != digest:
            raise SaveError(
                f"{save} is not committed: its save function has changed {path}, which run "
                f"{save.run} had committed with that step. Write other content to another file."
            )
        if not (known and known.images):
            yield FileRecord(name, nbytes=seen.st_size, digest=digest, role=Path(name).parts[0])
