"""What a save by a user's own function leaves in the spool, for the step's flow to wait for.

A receipt is *started* before the function runs, and ends as *finished* with the files that it
wrote, or as *failed* with its error. A process that dies in between leaves a started receipt whose
process is gone, which counts as failed.
"""

import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from trinity_sync.errors import SpoolError
from trinity_sync.layout import SPOOL_FORMAT, Kind, check_name
from trinity_sync.snapshot.notes import TRAINER, from_text, make_record, to_text
from trinity_sync.snapshot.spool import JobSpool

State = Literal["started", "finished", "failed"]


@dataclass(frozen=True)
class Receipt:
    """One call of a save function, by name, for one step."""

    name: str
    run: int
    step: int
    kind: Kind
    rank: int
    process: str
    """``pid/start time`` of the process that runs the function, see `process_name`."""
    state: State = "started"
    error: str = ""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    """Paths below the step's folder that the function wrote."""

    @property
    def settled(self) -> "Receipt":
        """This receipt, failed if it was started by a process that is gone."""
        if self.state == "started" and not process_lives(self.process):
            return replace(self, state="failed", error="the process died before it had ended")
        return self


def write_receipt(spool: JobSpool, receipt: Receipt) -> None:
    """Put the receipt into the spool, in the place of an earlier state of it."""
    spool.make()
    spool.receipts.mkdir(mode=0o700, exist_ok=True)
    path = _path(spool, receipt)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(to_text(asdict(receipt), SPOOL_FORMAT))
    temporary.replace(path)


def receipts_of(spool: JobSpool, run: int, step: int, kind: Kind) -> Iterator[Receipt]:
    """The receipts of one save, settled.

    Raises:
        SpoolError: one of them is torn.
        FormatError: another release has written one of them.
    """
    for path in sorted(spool.receipts.glob(f"{run}.{step}.{kind}.*.json")):
        try:
            body = from_text(path.read_bytes(), path, SPOOL_FORMAT, writer=TRAINER)
            receipt = make_record(Receipt, body)
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


def forget_receipts(spool: JobSpool, run: int, step: int, kind: Kind) -> None:
    """Remove the receipts of a save whose commit lists them."""
    for path in spool.receipts.glob(f"{run}.{step}.{kind}.*.json"):
        path.unlink(missing_ok=True)


def process_name(pid: int) -> str:
    """``pid/start time``: unlike a pid alone, never another process later on.

    Raises:
        ProcessLookupError: there is no such process, or it has ended and nobody waited for it yet.
    """
    fields = process_fields(pid)
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}/{fields[19]}"


def process_home() -> str:
    """Where a process of this one's `process_name` can be looked for: ``host/pid:[namespace]``.

    Containers may have a host name in common, and each see no process but their own.
    """
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}"


def process_fields(pid: int) -> list[str]:
    """What ``/proc/{pid}/stat`` says of a process, from its state on.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it is another user's, and hidden (``hidepid`` of ``/proc``).
    """
    try:
        # the command, in parentheses, may hold any bytes: the process names itself, and the kernel
        # cuts that after 15 of them
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
        return fields.decode("ascii").split()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error


def process_lives(name: str) -> bool:
    """Whether the process of that name (`process_name`) still runs on this node.

    One that is hidden counts as running: there is one of its pid.
    """
    pid, _, _ = name.partition("/")
    if not (pid.isascii() and pid.isdigit()):
        return False  # no name of a process
    try:
        return process_name(int(pid)) == name
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def _path(spool: JobSpool, receipt: Receipt) -> Path:
    name = check_name("name of a save", receipt.name)
    save = f"{receipt.run}.{receipt.step}.{receipt.kind}"
    return spool.receipts / f"{save}.{name}.rank{receipt.rank}.json"
