"""Every error that trinity_sync raises on purpose.

::

    TrinitySyncError
     ├─ ConfigError          a setting, path or argument that cannot work (also a ValueError)
     │   └─ RootError        a root whose file system cannot keep what a commit promises
     ├─ MissingPackageError  an integration's package is not installed (also an ImportError)
     ├─ SpoolError           the spool of this node cannot serve
     │   ├─ SpoolFull        too little shared memory; says how many bytes are needed
     │   └─ TicketError      a ticket that is torn, corrupted or of another version
     ├─ ImageError           a state that cannot be staged, or an image that cannot be read
     ├─ SaveError            a save that cannot be committed
     │   ├─ MissingShards    ranks or components that were never handed over
     │   ├─ Abandoned        a later run of the job resumed from an earlier step
     │   ├─ SaveFailed       raised to the caller for every save that failed (`wait_all`)
     │   └─ SaveTimeout      the save has not ended yet; it may still commit
     ├─ CommitError          what is on disk is not a committed step
     │   └─ ManifestError    a manifest that is torn, corrupted or of another version
     ├─ ExportError          shards that cannot be written as a Hugging Face model
     ├─ RemoteError          a store of copies cannot be reached, read or written
     │   └─ DamagedCopy      what is there are not the bytes that its manifest names
     ├─ StepClaimed          a lease or a pin holds a step that was to be taken away
     ├─ LockTimeoutError     a lock that another process has for too long
     ├─ CatalogError         the SQL index is away, refuses, or is of a newer version
     ├─ WeightSyncError      weights that did not get from the trainer to a reader
     │   └─ DeltaError       a delta that is torn, or does not fit the weights it is applied to
     ├─ UnsupportedTorchError  a name of torch is not there (also an ImportError)
     └─ StackError           Prefect server, Ray or the flow worker cannot be reached or started
         └─ PrefectApiError  the API of a Prefect server does not answer, or not as it should
             └─ RequestRefusedError  the server will never accept the request

A message names the job, step, role, rank and path that it is about, and ends with what to do.
"""

from pathlib import Path


class TrinitySyncError(Exception):
    """Base of every error that trinity_sync raises on purpose."""


class ConfigError(TrinitySyncError, ValueError):
    """A setting, path or argument that cannot work."""


class UnsupportedTorchError(TrinitySyncError, ImportError):
    """The installed torch lacks a private name that trinity_sync needs."""


class RootError(ConfigError):
    """A root whose file system lacks what a commit needs, or that not all nodes see alike."""


class MissingPackageError(TrinitySyncError, ImportError):
    """An integration needs a package that this environment lacks."""


class SpoolError(TrinitySyncError):
    """The spool of this node cannot serve."""


class SpoolFull(SpoolError):
    """Too little shared memory for the image; the message says how much is needed."""


class TicketError(SpoolError):
    """A ticket that is torn, corrupted or of another version.

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


class MissingShards(SaveError):
    """Ranks or components of a step that were never handed over."""


class Abandoned(SaveError):
    """A save of a run that a later run of the same job has left behind."""


class SaveFailed(SaveError):
    """Saves of this process failed: they were not committed, or their models not exported."""


class SaveTimeout(SaveError):
    """A save has not ended within the time that the caller allowed; it may still commit."""


class CommitError(TrinitySyncError):
    """What is on disk is not a committed step."""


class ManifestError(CommitError):
    """A manifest that is torn, corrupted or of another version."""


class ExportError(TrinitySyncError):
    """Shards that cannot be written as a Hugging Face model."""


class RemoteError(TrinitySyncError):
    """A store of copies cannot be reached, read or written."""


class DamagedCopy(RemoteError):
    """A file in a store has other bytes than its manifest says."""


class StepClaimed(TrinitySyncError):
    """A lease or a pin holds a step that was to be taken away."""


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
