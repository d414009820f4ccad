"""Required remote: a step counts once the remote has it; the root may vanish.

A checkpoint is committed in the root, replicated (`replicate_and_record`), and recorded as
replicated. With its first step, a run creates a record of its number in the remote, by a write that
succeeds once (``If-None-Match`` on S3); manifests are created the same way. So of two trainings
that write to one remote, the one that a later run superseded is refused, and of two with the same
number the second. A remote has no locks, so a superseded training may still overwrite files of a
step that both upload at the same time; a resume then uses the step before (`fetch_newest`).
"""

import logging
from pathlib import Path

from trinity_sync.errors import CommitError, CorruptedCopyError, RemoteError, TrinitySyncError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import (
    Replicated,
    claim_remote,
    join_remote,
    replicate,
    sending_lock,
)
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.storage.discovery import find_newest, iter_committed_steps, require_committed
from trinity_sync.storage.job_settings import (
    needs_replication,
    read_job_settings,
    record_replicated,
)
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import add_run, is_run_gone

logger = logging.getLogger(__name__)


def init_required_remote(root: Path, url: str) -> Manifest | None:
    """Check the required remote of a root, which may be new, and fetch its newest step.

    Return the manifest of the step that was fetched; None if the root has the newest step.

    Raises:
        RemoteError: the remote cannot be read and written.
        ConfigError: another job's steps are there.
        CommitError: the root has another step of the same number, or another run.
        FormatError: another release has begun a run or sent a newer step there.
    """
    remote = Remote(url)
    join_remote(root, remote, by_pull=False)
    open_identity(root)
    claim_remote(root, remote)
    if not remote.supports_exclusive_create():
        logger.warning(
            "%s does not support exclusive creation (If-None-Match): two trainings that write "
            "there at the same time are not detected",
            remote.url,
        )
    return fetch_newest(root, remote)


def fetch_newest(root: Path, remote: Remote) -> Manifest | None:
    """Fetch the newest checkpoint of a remote, unless the root has it or a newer one.

    A checkpoint whose bytes differ from its manifest is skipped, as a corrupted one in a root is.
    Return the manifest of the step that was fetched, or None.
    """
    for run in (runs := remote.list_runs()):
        add_run(root, run)  # the next run here gets an unused number
    counting = [each for each in remote.iter_newest_first() if each.serves("checkpoint")]
    for manifest in (*counting, None):
        here = find_newest(root)
        same = [run for run in runs if here and run.number == here.run]  # it may send just now
        is_older = here and manifest and here.run < manifest.run
        if here and not is_older and is_run_gone(same, here.run, here.run_key):
            raise CommitError(
                f"run {here.run} in {root} is another training than run {here.run} at {remote.url}."
                " Start in a new root to continue that one, or use another remote for this one"
            )
        if not manifest or (here and (here.run, here.step) >= (manifest.run, manifest.step)):
            return None
        try:
            logger.info("fetching step %d from %s into %s", manifest.step, remote.url, root)
            fetched, _ = fetch(remote.url, manifest.step, root, replace=True)
        except CorruptedCopyError as error:
            logger.error("using the step before: %s", error)
            continue
        record_replicated(root, remote.url, fetched)
        return fetched
    return None


def replicate_and_record(root: Path, url: str, step: int) -> Replicated:
    """Replicate a committed checkpoint, and record it if the remote is that of the job.

    Raises:
        SupersededError: another training resumed from an earlier step, or has this run's number.
        CommitError, RemoteError: as ``replicate``.
    """
    remote, manifest = Remote(url), require_committed(root, step)
    done = replicate(root, url, step)
    if remote.url == read_job_settings(root).remote:
        record_replicated(root, remote.url, manifest)
    return done


def replicate_missing(root: Path, url: str) -> list[int] | None:
    """Replicate the checkpoints that the job's remote lacks, newest first; return their steps.

    Failures are logged and retried at the next call. None means that ``url`` is another remote, or
    that another process does it, which then looks again at what was committed meanwhile.

    Raises:
        RemoteError: the remote cannot be reached or written.
    """
    url, replicated, tried = url.rstrip("/"), list[int](), set[tuple[int, int]]()
    if url != read_job_settings(root).remote:
        return None
    while missing := [
        each
        for each in iter_committed_steps(root)
        if (each.run, each.step) not in tried and needs_replication(root, each, url)
    ]:
        with try_acquire_file_lock(sending_lock(root, url, "all-")) as acquired:
            if not acquired:
                return None
            for manifest in reversed(missing):
                tried.add((manifest.run, manifest.step))
                try:
                    replicate_and_record(root, url, manifest.step)
                    replicated.append(manifest.step)
                except TrinitySyncError as error:
                    if isinstance(error, RemoteError) and not replicated:
                        raise
                    logger.warning("step %d is not replicated to %s: %s", manifest.step, url, error)
    return sorted(replicated)
