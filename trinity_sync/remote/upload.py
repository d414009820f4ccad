"""Copy a committed step into a store: the shards first, the manifest last.

A file is digested as it is read, so what is corrupted here is never copied under a good manifest.
Of what arrived, the size is compared; that the store holds the bytes it was sent is the word of its
protocol (S3 compares a checksum of each part), unless ``read_back`` asks to see them again.
`fetch` compares every digest anyway. While it is read, the step is leased.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trinity_sync.errors import CommitError, ManifestError, RemoteError
from trinity_sync.fs.direct_io import DIGEST
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import MANIFEST, step_folder
from trinity_sync.remote.remote_root import CHUNK, Remote
from trinity_sync.storage.leases import Lease, acquire_lease
from trinity_sync.storage.manifest import FileRecord, Manifest, parse_manifest

PARALLEL = 4
"""Files that are under way at a time."""


@dataclass(frozen=True)
class Replicated:
    """What a copy cost, and what it made superfluous."""

    url: str
    step: int
    run: int
    uploaded: int
    """Files; the others were there."""
    nbytes: int
    """Bytes of those files."""
    seconds: float
    removed: tuple[int, ...]
    """Steps that retention removed from the store."""


def replicate(
    root: str | Path,
    url: str,
    step: int,
    *,
    keep_last: int = 0,
    read_back: bool = False,
    parallel: int = PARALLEL,
    on_progress: OnProgress = no_progress,
) -> Replicated:
    """Copy a committed step to ``url/global_step_{step}``; what is there already is not sent again.

    Args:
        root: the job's root.
        url: the job's folder in the store.
        step: a committed one.
        keep_last: so many of the newest steps stay in the store, and this one; 0 keeps all.
        read_back: read every file that was sent again, and compare its digest.
        parallel: files at a time; each takes about three chunks of 16 MiB of memory.
        on_progress: is told how far the copy is; with ``read_back`` each byte counts twice.

    Raises:
        CommitError: the step is not committed, or corrupted here.
        RemoteError: the store cannot be reached or written.
        ConfigError: the URL cannot be used.
    """
    remote = Remote(url)
    start = time.perf_counter()
    with acquire_lease(root, step, f"replicate to {remote.url}") as lease:
        text = (step_folder(root, step) / MANIFEST).read_bytes()
        manifest = parse_manifest(text, step_folder(root, step) / MANIFEST, step)
        missing = _missing(remote, manifest)
        passes = 2 if read_back else 1
        whole = passes * sum(record.nbytes for record in missing)

        def took(nbytes: int) -> None:
            on_progress(nbytes, whole)

        def send(record: FileRecord) -> bool:
            if remote.is_uploaded(step, record):
                took(passes * record.nbytes)
                return False
            path = step_folder(root, step) / record.path
            remote.upload(step, record.path, _read(path, record, lease, took), record.nbytes)
            if read_back:
                _compare(remote, step, record, took)
            remote.note_upload(step, record)
            return True

        with ThreadPoolExecutor(parallel, "replicate") as pool:
            jobs = [pool.submit(send, record) for record in missing]
            try:
                sent = [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        _commit(remote, step, text)
        if missing:
            remote.forget_uploads(step)
    removed = _keep(remote, keep_last, manifest) if keep_last else ()
    nbytes = sum(record.nbytes for record, new in zip(missing, sent, strict=True) if new)
    seconds = time.perf_counter() - start
    return Replicated(remote.url, step, manifest.run, sum(sent), nbytes, seconds, removed)


def _commit(remote: Remote, step: int, text: bytes) -> None:
    """Put the manifest there; where there was none, by a write that one of two succeeds with."""
    there = remote.read(step, MANIFEST)
    if there is None and not remote.create(step, MANIFEST, text):
        there = remote.read(step, MANIFEST)
        if there != text:
            raise RemoteError(
                f"step {step} at {remote.url} was committed by somebody else meanwhile, with other "
                "files; repeat once nobody else sends it"
            )
    elif there not in (None, text):
        remote.write(step, MANIFEST, text)


def _missing(remote: Remote, manifest: Manifest) -> list[FileRecord]:
    """The files that a commit in the store does not vouch for; it ends if one must be replaced."""
    step = manifest.step
    try:
        there = remote.manifest(step)
    except ManifestError:
        there = None
        remote.uncommit(step)
    if there is None:
        return list(manifest.files)
    sizes = remote.sizes(step)
    missing = [
        record
        for record in manifest.files
        if (known := there.file(record.path)) is None
        or known.digest != record.digest
        or sizes.get(record.path) != record.nbytes
    ]
    if any(there.file(record.path) for record in missing):
        remote.uncommit(step)  # never a manifest beside other files than its own
    return missing


def _read(
    path: Path, record: FileRecord, lease: Lease, took: Callable[[int], object]
) -> Iterator[bytes]:
    """The file's bytes, if they are those of the manifest; the last chunk comes after the proof."""
    digest = xxhash.xxh3_128()
    left = record.nbytes
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                lease.renew()
                digest.update(chunk)
                left -= len(chunk)
                if left <= 0 and f"{DIGEST}:{digest.hexdigest()}" != record.digest:
                    raise CommitError(
                        f"{path} is corrupted: its digest is not that of the manifest, and it is "
                        "not copied. Restore the file, or replicate another step."
                    )
                yield chunk
                took(len(chunk))
    except OSError as error:
        raise CommitError(f"{path} cannot be read: {error.strerror}") from error
    if left:
        raise CommitError(f"{path} changed while it was copied; repeat, or take another step")


def _compare(remote: Remote, step: int, record: FileRecord, took: Callable[[int], object]) -> None:
    if wrong := remote.wrong_with(step, record, took):
        raise RemoteError(
            f"{remote.url}/global_step_{step}/{record.path} {wrong} after it was sent; the step is "
            "not committed there. Repeat, or look at the store."
        )


def _keep(remote: Remote, last: int, latest: Manifest) -> tuple[int, ...]:
    """Remove the oldest committed steps from the store; never the one that was just copied."""
    superfluous = [m.step for m in remote.committed()[:-last] if m.step != latest.step]
    for step in superfluous:
        remote.remove(step)
    return tuple(superfluous)
