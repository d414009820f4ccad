"""A remote holds the steps of one job, whose identity is in a small file there.

::

    url/.trinity_sync/identity.json     as in the root, see `snapshot.job_identity`

Steps are numbered alike in all jobs, so two jobs in one remote would take and remove each other's.
"""

from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.layout import steps_on_disk
from trinity_sync.remote.remote_root import Remote
from trinity_sync.snapshot.job_identity import JobIdentity, open_identity, read_identity
from trinity_sync.storage.runs import list_runs


def claim_remote(root: Path, remote: Remote) -> None:
    """Require that a remote is the job's, before it is changed; the first job claims it.

    Raises:
        ConfigError: it has the steps of another job.
        RemoteError: it cannot be read or written.
    """
    mine = read_identity(root)
    theirs = remote.read_identity()
    if theirs is None and mine:
        theirs = remote.create_identity(JobIdentity(mine, str(root)))
    if theirs and theirs.identity != mine:
        raise _make_error(root, remote, theirs)


def join_remote(root: Path, remote: Remote) -> None:
    """Require that a remote is the job's, before steps are fetched; a new root continues its job.

    Raises:
        ConfigError: it has the steps of another job.
        RemoteError: it cannot be read.
    """
    theirs = remote.read_identity()
    if theirs is None or theirs.identity == read_identity(root):
        return
    if steps_on_disk(root) or list_runs(root):
        raise _make_error(root, remote, theirs)
    open_identity(root, adopted=theirs.identity)


def _make_error(root: Path, remote: Remote, theirs: JobIdentity) -> ConfigError:
    return ConfigError(
        f"{remote.url} has the steps of another job, whose root is {theirs.root}; that of {root} "
        "began anew or is a copy. Use another remote for it: trinity-sync jobs set "
        f"{root} remote=URL. To continue the other job, fetch its steps into a new root: "
        f"trinity-sync remote pull NEW-ROOT latest {remote.url}"
    )
