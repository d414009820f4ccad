"""What a save by a user's own function leaves in the spool, for the step's flow to wait for.

A receipt is *started* before the function runs, and ends as *finished* with the files that it
wrote, or as *failed* with its error. A process that dies in between leaves a started receipt whose
process is gone, which counts as failed.
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
    """One call of a save function, by name, for one step."""

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
        """This receipt, failed if it was started by a process that is gone."""
        if self.state == "started" and not is_process_alive(self.process):
            return replace(self, state="failed", error="the process died before it had ended")
        return self


def write_status(spool: JobSpool, receipt: CallableStatus) -> None:
    """Put the receipt into the spool, in the place of an earlier state of it."""
    spool.make()
    spool.receipts.mkdir(mode=0o700, exist_ok=True)
    replace_file(_path(spool, receipt), encode_record(receipt), sync=False)


def read_statuses(spool: JobSpool, run: int, step: int, kind: Kind) -> Iterator[CallableStatus]:
    """The receipts of one save, settled.

    Raises:
        SpoolError: one of them is torn.
        FormatError: another release has written one of them.
    """
    for path in sorted(spool.receipts.glob(f"{run}.{step}.{kind}.*.json")):
        try:
            receipt = decode_record(CallableStatus, path.read_bytes(), path)
            if path != _path(spool, receipt):
                raise ValueError("it is that of another save")
        except FileNotFoundError:
            continue  # forgotten meanwhile
        except ValueError as error:
            raise SpoolError(
                f"receipt {path} of step {step} is torn, so nobody can tell how that save function "
                "ended. Remove it; the step is not committed, the next save goes on."
            ) from error
        yield receipt.settled


def remove_statuses(spool: JobSpool, run: int, step: int, kind: Kind) -> None:
    """Remove the receipts of a save whose commit lists them."""
    for path in spool.receipts.glob(f"{run}.{step}.{kind}.*.json"):
        path.unlink(missing_ok=True)


def _path(spool: JobSpool, receipt: CallableStatus) -> Path:
    name = check_name("name of a save", receipt.name)
    save = f"{receipt.run}.{receipt.step}.{receipt.kind}"
    return spool.receipts / f"{save}.{name}.rank{receipt.rank}.json"
