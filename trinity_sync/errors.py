"""Every error that trinity_sync raises on purpose.

::

    TrinitySyncError
     ├─ ConfigError                 a setting, path or argument that cannot work (also a ValueError)
     │   └─ RootError               a root whose file system cannot keep what a commit promises
     ├─ MissingPackageError         an integration's package is not installed (also an ImportError)
     ├─ FormatError                 a record of another release; says which environment to upgrade
     ├─ SpoolError                  the spool of this node cannot serve
     │   ├─ SpoolFullError          too little shared memory; says how many bytes are needed
     │   └─ TicketError             a ticket that is torn or corrupted
     ├─ ImageError                  a state that cannot be staged, or an image that cannot be read
     ├─ SaveError                   a save that cannot be committed
     │   ├─ MissingShardsError      ranks or components that were never handed over
     │   ├─ SupersededError         a later run of the job resumed from an earlier step
     │   ├─ SaveFailedError         raised to the caller for every save that failed (`wait_all`)
     │   └─ SaveTimeoutError        the save has not ended yet; it may still commit
     ├─ CommitError                 what is on disk is not a committed step
     │   └─ ManifestError           a manifest that is torn or corrupted
     ├─ ExportError                 shards that cannot be written as a Hugging Face model
     ├─ RemoteError                 a store of copies cannot be reached, read or written
     │   └─ CorruptedCopyError      what is there are not the bytes that its manifest names
     ├─ StepInUseError              steps to be removed are leased, pinned or tagged
     ├─ LockTimeoutError            a lock that another process has for too long
     ├─ CatalogError                the SQL index is away, refuses, or is of a newer version
     ├─ WeightSyncError             weights that did not get from the trainer to a reader
     │   └─ DeltaError              a delta that is torn, or does not fit the weights
     ├─ UnsupportedTorchError       a name of torch is not there (also an ImportError)
     ├─ UnsupportedPrefectError     a name of Prefect is not there (also an ImportError)
     └─ StackError                  server, Ray or flow worker cannot be reached or started
         └─ PrefectApiError         a Prefect server does not answer, or not as it should
             └─ RequestRefusedError the server will never accept the request

A message names the job, step, role, rank and path that it is about, and ends with what to do.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class TrinitySyncError(Exception):
    """Base of every error that trinity_sync raises on purpose."""


class ConfigError(TrinitySyncError, ValueError):
    """A setting, path or argument that cannot work."""


class UnsupportedTorchError(TrinitySyncError, ImportError):
    """The installed torch lacks a private name that trinity_sync needs."""


class UnsupportedPrefectError(TrinitySyncError, ImportError):
    """The installed Prefect or prefect-ray lacks a private name that trinity_sync needs."""


class RootError(ConfigError):
    """A root whose file system lacks what a commit needs, or that not all nodes see alike."""


class MissingPackageError(TrinitySyncError, ImportError):
    """An integration needs a package that this environment lacks."""


class FormatError(TrinitySyncError):
    """A record that another release of trinity-sync has written, in a format that this one lacks.

    It is neither torn nor corrupted: nothing that it describes is removed, evicted or replaced.

    Attributes:
        path: of the file; None for the parameters of a flow run.
        found, known: formats of the record and of this environment.
        run, step: what the record is about, as far as it says so: these names keep their meaning in
            all formats.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        found: int = 0,
        known: int = 0,
        run: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.found = found
        self.known = known
        self.run = run
        self.step = step

    @classmethod
    def between(
        cls,
        what: str | Path,
        found: int,
        known: int,
        *,
        writer: str = "the environment that wrote it",
        reader: str = "this environment",
        run: int | None = None,
        step: int | None = None,
    ) -> "FormatError":
        """Make the error whose message names the older of the two environments.

        Args:
            what: the file, or a name of what is no file.
            found, known, run, step: see the class.
            writer, reader: the two environments, in words.
        """
        older = writer if found < known else reader
        message = (
            f"{what} has format {found}, and {reader} ({sys.prefix}) reads format {known}: upgrade "
            f"trinity-sync in {older}. Until then it is left as it is."
        )
        path = what if isinstance(what, Path) else None
        return cls(message, path=path, found=found, known=known, run=run, step=step)


class SpoolError(TrinitySyncError):
    """The spool of this node cannot serve."""


class SpoolFullError(SpoolError):
    """Too little shared memory for the image; the message says how much is needed."""


class TicketError(SpoolError):
    """A ticket that is torn or corrupted.

    Attributes:
        path: of the ticket.
        role, component, rank: of its slot, whose name has them; empty and -1 for another name.
        run, step: as far as the ticket can be read, else None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        role: str = "",
        component: str = "",
        rank: int = -1,
        run: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.role = role
        self.component = component
        self.rank = rank
        self.run = run
        self.step = step


class ImageError(TrinitySyncError):
    """A state that cannot be staged, or an image that is truncated, replaced or unreadable."""


class SaveError(TrinitySyncError):
    """A save that cannot be committed."""


class MissingShardsError(SaveError):
    """Ranks or components of a step that were never handed over."""


class SupersededError(SaveError):
    """A save of a run that a later run of the same job has left behind."""


class SaveFailedError(SaveError):
    """Saves of this process failed: they were not committed, or their models not exported."""


class SaveTimeoutError(SaveError):
    """A save has not ended within the time that the caller allowed; it may still commit."""


class CommitError(TrinitySyncError):
    """What is on disk is not a committed step."""


class ManifestError(CommitError):
    """A manifest that is torn or corrupted."""


class ExportError(TrinitySyncError):
    """Shards that cannot be written as a Hugging Face model."""


class RemoteError(TrinitySyncError):
    """A store of copies cannot be reached, read or written."""


class CorruptedCopyError(RemoteError):
    """A file in a store has other bytes than its manifest says."""


class StepInUseError(TrinitySyncError):
    """Steps that were to be removed or quarantined are leased, pinned or tagged.

    Attributes:
        holders: names of the readers, or the reasons of pins and tags, by step.
    """

    def __init__(self, message: str, *, holders: Mapping[int, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.holders = {step: tuple(names) for step, names in (holders or {}).items()}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, in order."""
        return tuple(sorted(self.holders))


class LockTimeoutError(TrinitySyncError):
    """Another process has a lock for longer than whoever waited for it could wait."""

    def __init__(self, message: str, *, path: Path | None = None, holder: str = "") -> None:
        super().__init__(message)
        self.path = path
        """Of the lock's file."""
        self.holder = holder
        """Who has it, in words."""


class CatalogError(TrinitySyncError):
    """The SQL index of steps is away, refuses, or is of a newer version; files do not need it."""


class WeightSyncError(TrinitySyncError):
    """Weights that did not get from the trainer to a reader, or not completely."""


class DeltaError(WeightSyncError):
    """A delta that is torn, or does not fit the weights that it is applied to."""


class StackError(TrinitySyncError):
    """The Prefect server, Ray or the flow worker cannot be reached or started."""


class PrefectApiError(StackError):
    """The API of a Prefect server does not answer, or not as it should.

    Attributes:
        url: of the API, without a password; empty if none is known.
        status: HTTP status of the answer; 0 if there was none.
    """

    def __init__(self, message: str, *, url: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.url = url
        self.status = status


class RequestRefusedError(PrefectApiError):
    """The Prefect server will never accept the request, as when client and stack differ."""


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra within the block.

    Raises:
        MissingPackageError: one is not installed; the message names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{error.name} is not installed in {sys.prefix}. Install the version that you train "
            f'with, or: pip install "trinity-sync[{extra}]"',
            name=error.name,
        ) from error
