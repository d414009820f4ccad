"""Upload of a committed step to a remote: the shards first, the manifest last.

Files are digested as they are read, so a corrupted file is never copied under a valid manifest. The
sizes of uploaded files are compared; the remote's protocol vouches for their bytes (S3 compares a
checksum of each part). `fetch` compares every digest. The step is leased while it is read.

A remote holds the steps of one job, whose identity is there, and each run that has sent a step:
steps are numbered alike in all jobs, so two jobs in one remote would take and remove each other's.
So would two roots of one job, of which one is a copy that cannot see the other: their runs have the
same numbers and other keys.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trinity_sync.errors import (
    CommitError,
    ConfigError,
    ManifestError,
    RemoteError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import open_no_follow
from trinity_sync.fs.direct_io import DIGEST, OnProgress, no_progress
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, step_folder, steps_on_disk
from trinity_sync.remote.remote_root import CHUNK, Remote
from trinity_sync.snapshot.identity import IDENTITY_FILE, JobIdentity, open_identity, read_identity
from trinity_sync.storage.block_reuse import WORTHWHILE
from trinity_sync.storage.job_settings import has_replicated, read_job_settings
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    encode_manifest,
    group_equal,
    read_manifest,
)
from trinity_sync.storage.runs import FETCHED, Run, find_superseding_run, list_runs
from trinity_sync.storage.steps_in_use import lease_to_read

PARALLEL = 4
"""Number of files that are in flight at a time."""


@dataclass(frozen=True)
class Replicated:
    """Result of an upload."""

    url: str
    step: int
    run: int
    uploaded: int
    """Number of files that were uploaded; the others were there."""
    nbytes: int
    """Bytes of those files that were sent; equal and unchanged ones are copied by the remote."""
    seconds: float


def replicate(
    root: str | Path,
    url: str,
    step: int,
    *,
    parallel: int = PARALLEL,
    on_progress: OnProgress = no_progress,
) -> Replicated:
    """Copy a committed step to ``url/global_step_{step}``; files that are there are not sent again.

    Waits for another upload from the root to this remote: two would rewrite each other's files.
    Each of ``parallel`` files in flight takes about three chunks of 16 MiB memory.

    Raises:
        CommitError: the step is not committed, or corrupted here.
        RemoteError: the remote cannot be reached or written.
        ConfigError: the URL cannot be used, or steps of another job or of another root's training
            are there.
        SupersededError: the remote has the step of a later run.
    """
    remote = Remote(url)
    start = time.perf_counter()
    claim_remote(Path(root), remote)
    with ExitStack() as held:
        with suppress(OSError):  # the root cannot be written
            held.enter_context(acquire_file_lock(sending_lock(root, remote.url), limit_s=math.inf))
        manifest = held.enter_context(lease_to_read(root, step, f"replicate to {remote.url}"))
        _claim_run(Path(root), remote, manifest)
        before, missing = _list_missing(root, remote, manifest)
        if before is None:
            remote.remove_others(manifest)
        earlier = _find_unchanged(root, remote, step, missing)
        total = sum(record.nbytes for record in missing)

        def on_sent(nbytes: int) -> None:
            on_progress(nbytes, total)

        def upload(records: Sequence[FileRecord]) -> list[int]:  # of equal files
            first, sent = records[0], []
            for record in records:
                if remote.is_uploaded(step, record):
                    on_sent(record.nbytes)
                    continue
                source = (step, first.path) if record is not first else earlier.get(record.digest)
                if source and _copy(remote, source, step, record):
                    on_sent(record.nbytes)
                    sent.append(0)
                else:
                    chunks = _read_chunks(step_folder(root, step) / record.path, record, on_sent)
                    remote.upload_file(step, record.path, chunks, record.nbytes)
                    sent.append(record.nbytes)
                remote.record_upload(step, record)
            for record in records if len(records) > 1 and remote.folder else ():
                remote.record_upload(step, record)  # a link changes the state of the file
            return sent

        with ThreadPoolExecutor(parallel, "replicate") as pool:
            uploads = pool.map(upload, group_equal(missing))
            sent = [nbytes for each in uploads for nbytes in each]  # an error cancels what is left
        _commit(remote, before, manifest)
        if missing:
            remote.remove_upload_records(step)
    seconds = time.perf_counter() - start
    return Replicated(remote.url, step, manifest.run, len(sent), sum(sent), seconds)


def _find_unchanged(
    root: str | Path, remote: Remote, step: int, missing: Sequence[FileRecord]
) -> dict[str, tuple[int, str]]:
    """Return step and path of files of the step before, in the remote, by the digests of missing.

    No request is made if the root's step before has no such file, or only small ones.
    """
    wanted = {record.digest for record in missing if record.nbytes >= WORTHWHILE}
    with suppress(TrinitySyncError):
        before = max((each for each in steps_on_disk(root) if each < step), default=None)
        here = before is not None and read_manifest(root, before)
        if here and not wanted.isdisjoint(record.digest for record in here.files):
            there = remote.read_step(here.step)
            files = there.manifest.files if there.manifest and there.state == "valid" else ()
            return {each.digest: (here.step, each.path) for each in files if each.digest in wanted}
    return {}


def _copy(remote: Remote, source: tuple[int, str], step: int, record: FileRecord) -> bool:
    """Copy a file within the remote, unless it is gone, or another one by now."""
    with suppress(RemoteError):
        return remote.copy_file(source, step, record.path) and not (
            remote.folder
            and source[0] != step  # a store has digests of its own
            and remote.find_mismatch(step, record, lambda _: None)
        )
    return False


def sending_lock(root: str | Path, url: str, what: str = "") -> Path:
    """Return the path of the lock of the uploads from a root to a remote."""
    name = f"sending-{what}{xxhash.xxh3_64_hexdigest(url.encode())}.lock"
    return Path(root) / PRIVATE_FOLDER / name


def _commit(remote: Remote, before: Manifest | None, manifest: Manifest) -> None:
    """Write the manifest in the place of the one before; if there was none, one writer succeeds."""
    step, text = manifest.step, encode_manifest(manifest)
    if before == manifest:
        return
    if before is None:
        if remote.create_file(step, MANIFEST, text):
            return
    elif remote.read_manifest(step) == before:
        remote.write_file(step, MANIFEST, text)
        return
    if remote.read_file(step, MANIFEST) != text:
        raise RemoteError(
            f"step {step} at {remote.url} was committed by another process meanwhile, with other "
            "files; retry when no other process uploads it"
        )


def _list_missing(
    root: str | Path, remote: Remote, manifest: Manifest
) -> tuple[Manifest | None, list[FileRecord]]:
    """Return the manifest in the remote, unless it had to be removed, and what the remote lacks."""
    step = manifest.step
    try:
        there = remote.read_manifest(step)
    except ManifestError:
        there = None
        remote.remove_manifest(step)
    if there is None:
        return None, list(manifest.files)
    if there.run > manifest.run:
        raise SupersededError(
            f"step {step} of run {manifest.run} is not replicated: {remote.url} has the step of "
            f"run {there.run}, which is later. If run {manifest.run} still trains, stop it; "
            "otherwise no action is needed."
        )
    is_whole = there.serves("checkpoint") and there.weights_digest == manifest.weights_digest
    if manifest.removed and is_whole:
        return manifest, []  # a remote keeps whole steps
    sizes = remote.list_file_sizes(step)
    missing = [
        record
        for record in manifest.files
        if (known := there.find_file(record.path)) is None
        or known.digest != record.digest
        or sizes.get(record.path) != record.nbytes
    ]
    gone = {each.path for each in there.files} - {each.path for each in manifest.files}
    if gone or any(there.find_file(record.path) for record in missing):
        for record in missing:  # nothing that is corrupted here takes the place of a good copy
            for _ in _read_chunks(step_folder(root, step) / record.path, record, lambda _: None):
                pass
        remote.remove_manifest(step)  # a manifest must never be next to other files
        there = None
    return there, missing


def _read_chunks(
    path: Path, record: FileRecord, on_sent: Callable[[int], object]
) -> Iterator[bytes]:
    """Yield the bytes of a file; the last chunk comes after its digest was compared."""
    digest = xxhash.xxh3_128()
    left = record.nbytes
    try:
        with open_no_follow(path) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                left -= len(chunk)
                if left <= 0 and f"{DIGEST}:{digest.hexdigest()}" != record.digest:
                    raise CommitError(
                        f"{path} is not copied, because it is corrupted: its digest is not that of "
                        "the manifest. Restore the file, or replicate another step."
                    )
                yield chunk
                on_sent(len(chunk))
    except OSError as error:
        raise CommitError(f"{path} cannot be read: {error.strerror}") from error
    if left:
        raise CommitError(f"{path} changed while it was copied; retry, or replicate another step")


def claim_remote(root: Path, remote: Remote) -> None:
    """Require that a remote is the job's, before it is changed; the first job claims it.

    Raises:
        ConfigError: it has the steps of another job, or is in the root.
        RemoteError: it cannot be read or written, or lacks what it had, as without its mount.
    """
    remote.require_outside(root)
    mine = read_identity(root)
    theirs = remote.read_identity()
    if theirs is None and mine:
        if has_replicated(root, remote.url):
            raise RemoteError(
                f"{remote.url} has had steps of {root}, and lacks {IDENTITY_FILE} now: mount or "
                f"restore it. To send all again, remove {root}/{PRIVATE_FOLDER}/stored"
            )
        theirs = remote.create_identity(JobIdentity(mine, str(root)))
    if theirs and theirs.identity != mine:
        raise _make_error(root, remote, theirs)


def _claim_run(root: Path, remote: Remote, manifest: Manifest) -> None:
    """Require that the remote's runs are the root's, and record the step's run there.

    A start with a required remote fetches what other machines have sent, so only the run of the
    step is compared there.
    """
    if read_job_settings(root).required_remote == remote.url:
        return _claim_number(root, remote, manifest)
    mine = {run.number: run for run in list_runs(root) if not run.key.startswith(FETCHED)}
    if manifest.run in mine:
        remote.create_run(mine[manifest.run])
    for theirs in remote.list_runs():
        if theirs.number in mine and theirs.key != mine[theirs.number].key:
            raise ConfigError(
                f"step {manifest.step} of run {manifest.run} in {root} is not replicated: run "
                f"{theirs.number} at {remote.url} is that of another root, of which this one is a "
                "copy, or the reverse. Use another remote for one of the two: trinity-sync jobs "
                f"set {root} remote=URL"
            )


def _claim_number(root: Path, remote: Remote, manifest: Manifest) -> None:
    """Check that no other training uses the remote, and create the record of this run's number."""
    number, step = manifest.run, manifest.step
    run = next((run for run in list_runs(root) if run.number == number), Run(number, "", 0))
    theirs = remote.create_run(run)
    if theirs is None or theirs.key not in (run.key, manifest.run_key):  # a fetched run has another
        raise SupersededError(
            f"step {step} of run {number} in {root} is not replicated: run {number} at "
            f"{remote.url} belongs to another training. Stop one of the two."
        )
    if later := find_superseding_run(remote.list_runs(), number, step):
        raise SupersededError(
            f"step {step} of run {number} in {root} is not replicated: it is superseded by run "
            f"{later.number} at {remote.url}, which resumed from step {later.resumed_from}. Stop "
            "this training."
        )


def join_remote(root: Path, remote: Remote, *, by_pull: bool = True) -> None:
    """Require that a remote is the job's, before steps are fetched; a new root continues its job.

    Unless ``by_pull``, which asks for that, it does not while the root of the job is here.

    Raises:
        ConfigError: it has the steps of another job.
        RemoteError: it cannot be read.
    """
    theirs = remote.read_identity()
    if theirs is None or theirs.identity == read_identity(root):
        return
    is_here = False
    with suppress(OSError):
        is_here = not by_pull and read_identity(theirs.root) == theirs.identity
    if is_here or steps_on_disk(root) or list_runs(root):
        raise _make_error(root, remote, theirs)
    open_identity(root, adopted=theirs.identity)


def _make_error(root: Path, remote: Remote, theirs: JobIdentity) -> ConfigError:
    return ConfigError(
        f"{remote.url} has the steps of another job, whose root is {theirs.root}; that of {root} "
        "began anew or is a copy. Use another remote for it: trinity-sync jobs set "
        f"{root} remote=URL. To continue the other job, fetch its steps into a new root: "
        f"trinity-sync remote pull NEW-ROOT latest {remote.url}"
    )
