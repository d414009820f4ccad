"""The errors of trinity_sync.

::

    TrinitySyncError
     ├─ ConfigError                 a setting, path or argument is invalid (also a ValueError)
     │   └─ RootError               the root's file system lacks an operation that a commit needs
     ├─ MissingPackageError         an integration's package is not installed (also an ImportError)
     ├─ FormatError                 a root, spool, manifest or run is of another release
     ├─ SpoolError                  the spool of this node cannot be used
     │   ├─ SpoolFullError          too little shared memory; says how many bytes are needed
     │   ├─ HiddenSpoolError        the stack has another shared memory than the trainer
     │   └─ TicketError             a ticket is torn or corrupted
     ├─ ImageError                  a state cannot be staged, or an image cannot be read
     ├─ SaveError                   a save cannot be committed
     │   ├─ MissingShardsError      ranks or components were not submitted
     │   │   └─ EvictedError        their images were evicted for a later step
     │   ├─ SupersededError         a later run of the job resumed from an earlier step
     │   ├─ RemovedStepError        it was committed, and its step is gone since
     │   ├─ RootAwayError           the job is not at its root; the save waits until it is
     │   ├─ SaveFailedError         saves of this process have failed (`wait_all`)
     │   └─ SaveTimeoutError        a save has not ended in time; it may still commit
     ├─ CommitError                 a step is not committed, or not as its manifest says
     │   └─ ManifestError           a manifest is torn or corrupted
     ├─ ExportError                 shards cannot be written as a Hugging Face model
     ├─ RemoteError                 a remote cannot be reached, read or written
     │   └─ CorruptedCopyError      a file in a remote does not have the digest of its manifest
     ├─ StepInUseError              steps to be removed are leased, pinned or tagged
     ├─ RootInUseError              another run of the job is still running
     ├─ LockTimeoutError            another process holds a lock for too long
     ├─ CatalogError                the catalog cannot be used, or is of a newer version
     ├─ WeightSyncError             weights did not reach a reader
     │   └─ DeltaError              a delta is torn, or does not fit the weights
     ├─ UnsupportedTorchError       torch lacks a private name (also an ImportError)
     ├─ UnsupportedPrefectError     Prefect lacks a private name (also an ImportError)
     └─ StackError                  server, Ray or worker cannot be reached or started
         └─ PrefectApiError         a Prefect server does not answer as it should
             └─ RequestRefusedError the server will never accept the request

A message names the job, step, role, rank and path, and ends with what to do.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)


class TrinitySyncError(Exception):
    """Base class of the errors of trinity_sync.

    Attributes:
        hint: what to do, where the message does not say it; the command prints it as well.
    """

    hint: str = ""


class ConfigError(TrinitySyncError, ValueError):
    """A setting, path or argument is invalid."""


class UnsupportedTorchError(TrinitySyncError, ImportError):
    """The installed torch lacks a private name that trinity_sync needs."""


class UnsupportedPrefectError(TrinitySyncError, ImportError):
    """The installed Prefect lacks a private name that trinity_sync needs."""


class RootError(ConfigError):
    """The root's file system lacks an operation that a commit needs, or nodes do not share it."""


class MissingPackageError(TrinitySyncError, ImportError):
    """An integration needs a package that is not installed."""


class FormatError(TrinitySyncError):
    """A root, a job's spool, a manifest or a run is of a format that this release cannot read.

    It is neither torn nor corrupted: nothing in it is removed, evicted or replaced.

    Attributes:
        run: run that a manifest names; None otherwise. It keeps its meaning in all formats.
    """

    def __init__(self, message: str, *, run: int | None = None) -> None:
        super().__init__(message)
        self.run = run

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
    ) -> "FormatError":
        """Return an error whose message names the environment to upgrade.

        Args:
            what: path of the file, or a description of what is not a file.
            found, known: format that was found, and the format that this release reads.
            run: as in the class.
            writer, reader: descriptions of the two environments.
        """
        older = writer if found < known else reader
        return cls(
            f"{what} has format {found}, and {reader} ({sys.prefix}) reads format {known}: upgrade "
            f"trinity-sync in {older}. Until then it is left unchanged.",
            run=run,
        )


class SpoolError(TrinitySyncError):
    """The spool of this node cannot be used."""


class SpoolFullError(SpoolError):
    """Too little shared memory; the message says how many bytes are needed."""


class HiddenSpoolError(SpoolError):
    """The stack does not see the spool of a trainer on its node: it has another ``/dev/shm``."""


class TicketError(SpoolError):
    """A ticket is torn or corrupted.

    Attributes:
        path: path of the ticket.
        role, component, rank: from the name of its slot; empty and -1 for a file of another name.
        run, step: run and step of the image; None if they cannot be read.
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
    """A state cannot be staged, or an image is truncated, replaced or unreadable."""


class SaveError(TrinitySyncError):
    """A save cannot be committed.

    Attributes:
        path: file that cannot be written; None if the error is not about a file.
        rank: rank whose image it is; -1 if the error is not about a single rank.
    """

    def __init__(self, message: str, *, path: Path | None = None, rank: int = -1) -> None:
        super().__init__(message)
        self.path = path
        self.rank = rank


class MissingShardsError(SaveError):
    """Ranks or components of a step were not submitted."""


class EvictedError(MissingShardsError):
    """Images of a step were evicted from the spool for a later step; the save is lost."""


class SupersededError(SaveError):
    """A later run of the job has superseded the save."""


class RemovedStepError(SaveError):
    """A save was committed before, and its step has been removed or replaced since."""


class RootAwayError(SaveError):
    """This process does not see the job of a save at its root; the save waits until it does."""


class SaveFailedError(SaveError):
    """Saves of this process failed: they were not committed, or their models not exported."""


class SaveTimeoutError(SaveError):
    """A save has not ended in time; it may still commit."""


class CommitError(TrinitySyncError):
    """A step is not committed, or its files are not those of its manifest."""


class ManifestError(CommitError):
    """A manifest is torn or corrupted."""


class ExportError(TrinitySyncError):
    """Shards cannot be written as a Hugging Face model."""


class RemoteError(TrinitySyncError):
    """A remote cannot be reached, read or written."""


class CorruptedCopyError(RemoteError):
    """A file in a remote does not have the digest that its manifest names."""


class StepInUseError(TrinitySyncError):
    """Steps to be removed or quarantined are leased, pinned or tagged."""


class RootInUseError(TrinitySyncError):
    """An earlier run of the job is still running, and a new one would supersede its saves."""


class LockTimeoutError(TrinitySyncError):
    """Another process holds a lock for longer than the caller may wait."""


class CatalogError(TrinitySyncError):
    """The catalog, an SQL index of the files, cannot be used, or is of a newer version."""


class WeightSyncError(TrinitySyncError):
    """Weights did not reach a reader, or not completely."""


class DeltaError(WeightSyncError):
    """A delta is torn, or does not fit the weights that it is applied to."""


class StackError(TrinitySyncError):
    """The Prefect server, Ray or the flow worker cannot be reached or started."""


class PrefectApiError(StackError):
    """The API of a Prefect server does not answer as it should.

    Attributes:
        status: HTTP status of the answer; 0 if there was no answer.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RequestRefusedError(PrefectApiError):
    """The Prefect server will never accept the request: client and stack may differ."""


def describe_error(error: BaseException) -> str:
    """Return the text of an error, with its type if it is another library's.

    Unlike ``repr``, it names the file of an `OSError`.
    """
    return str(error) if isinstance(error, TrinitySyncError) else f"{type(error).__name__}: {error}"


def is_of_stack(error: BaseException) -> bool:
    """Return whether a save has failed for a fault of the stack, so that its saver may commit it.

    An I/O error is of the root, and most of ours are of an image, or refusals. All else is of the
    stack: Ray, Prefect, imports, another release or memory than the trainer's, what is unforeseen.
    """
    of_save = isinstance(error, (TrinitySyncError, OSError)) and not isinstance(error, ImportError)
    return not of_save or isinstance(error, (StackError, HiddenSpoolError, FormatError))


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra within the block.

    Raises:
        MissingPackageError: a package is not installed; the message names it and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{error.name} is not installed in {sys.prefix}. Install the version that you train "
            f'with, or: pip install "trinity-sync[{extra}]"',
            name=error.name,
        ) from error


@lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log a warning once, although every poll finds the same problem."""
    logger.warning("%s", message)
