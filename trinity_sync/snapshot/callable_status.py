"""The status of a user's save function, a small file in the spool that the step's flow waits for.

It is *started* before the function runs, and becomes *finished*, with the files that the function
wrote, or *failed*, with its error. If the process dies in between, a started status remains whose
process is gone; it counts as failed. The request of the step's flow run is kept next to it, since a
save of functions alone has no images by which the worker would find it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trinity_sync.errors import SpoolError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.process import is_process_alive
from trinity_sync.fs.records import TRAINER, Count, Record, Seconds, decode_record, encode_record
from trinity_sync.layout import SPOOL_FORMAT, Kind, check_name
from trinity_sync.snapshot.spool import JobSpool

State = Literal["started", "finished", "failed"]


@dataclass(frozen=True)
class CallableStatus(Record, format=SPOOL_FORMAT, writer=TRAINER):
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

    @property
    def settled(self) -> "CallableStatus":
        """This status, or a failed one if its process is gone before it has ended."""
        if self.state == "started" and not is_process_alive(self.process):
            return replace(self, state="failed", error="the process died before it had ended")
        return self


def write_status(spool: JobSpool, status: CallableStatus) -> None:
    """Write a status, in the place of an earlier one of the same call."""
    _replace(spool, _path(spool, status), encode_record(status))


def read_statuses(spool: JobSpool, run: int, step: int, kind: Kind) -> Iterator[CallableStatus]:
    """Yield the statuses of a save's functions; those of processes that are gone are failed.

    Raises:
        SpoolError: a file is torn.
        FormatError: another release has written a file.
    """
    for path in sorted(spool.receipts.glob(f"{run}.{step}.{kind}.*.rank*.json")):
        try:
            status = decode_record(CallableStatus, path.read_bytes(), path)
            if path != _path(spool, status):
                raise ValueError("it belongs to another save")
        except FileNotFoundError:
            continue  # removed meanwhile
        except ValueError as error:
            raise SpoolError(
                f"receipt {path} of step {step} is torn, so the result of its save function is "
                "unknown and the step is not committed. Remove it; later saves are unaffected."
            ) from error
        yield status.settled


def remove_statuses(spool: JobSpool, run: int, step: int, kind: Kind) -> None:
    """Remove the statuses of a save whose commit lists them, and its request."""
    for path in spool.receipts.glob(f"{run}.{step}.{kind}.*.json"):
        path.unlink(missing_ok=True)


def write_request(spool: JobSpool, run: int, step: int, kind: Kind, request: str) -> None:
    """Keep the request (JSON) of a save of functions until its flow run has ended."""
    _replace(spool, _request_path(spool, run, step, kind), request)


def list_requests(spool: JobSpool) -> list[Path]:
    """Return the files of `write_request`."""
    return sorted(spool.receipts.glob("*.request.json"))


def remove_request(spool: JobSpool, run: int, step: int, kind: Kind) -> None:
    """Remove the request of a save that failed; the statuses stay for a retry."""
    _request_path(spool, run, step, kind).unlink(missing_ok=True)


def _replace(spool: JobSpool, path: Path, content: str) -> None:
    spool.make()
    spool.receipts.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, content, sync=False)


def _request_path(spool: JobSpool, run: int, step: int, kind: Kind) -> Path:
    return spool.receipts / f"{run}.{step}.{kind}.request.json"


def _path(spool: JobSpool, status: CallableStatus) -> Path:
    name = check_name("name of a save", status.name)
    save = f"{status.run}.{status.step}.{status.kind}"
    return spool.receipts / f"{save}.{name}.rank{status.rank}.json"
