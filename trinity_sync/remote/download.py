"""Bring a step from a store back: download, compare digests, commit here by one rename.

The files gather in ``root/.trinity_sync/fetching/global_step_N``, where a download that broke off
goes on; the folder gets its name, with the manifest inside, when all of it is whole and durable.
"""

import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from trinity_sync.errors import CommitError, CorruptedCopyError
from trinity_sync.fs.atomic import make_folder, revalidate_folder, sync_folder
from trinity_sync.fs.direct_io import DIGEST, digest_of
from trinity_sync.fs.locks import file_lock, one_change_at_a_time
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import PRIVATE_FOLDER, step_folder
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import PARALLEL
from trinity_sync.storage.commit import update_latest_pointers
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    read_manifest,
    read_run_number,
    write_manifest_into,
)
from trinity_sync.storage.quarantine import fetching_folder
from trinity_sync.storage.replace import exchange_folders
from trinity_sync.storage.runs import Run, add_run


def fetch(
    url: str,
    step: int | None,
    root: str | Path,
    *,
    replace: bool = False,
    parallel: int = PARALLEL,
    on_progress: OnProgress = no_progress,
) -> tuple[Manifest, bool]:
    """Have a step of the store committed under ``root``; again is harmless.

    Take the root of the same job, or a new one: a step of a later run than any that is known here
    is the newest from then on, and what earlier runs have in flight beyond it lapses.

    Args:
        url: the job's folder in the store.
        step: which step; None for the newest that is whole there.
        root: a job's root; made if it is missing.
        replace: let it take the place of what has its number here, by an earlier run or corrupted.
        parallel: files at a time.
        on_progress: is told how far the download is.

    Returns:
        Its manifest, and whether anything had to be fetched.

    Raises:
        CommitError: the step is not committed there, its bytes are not those of its manifest, or
            there is another step of its number here.
        RemoteError: the store cannot be reached or read.
        CorruptedCopyError: the store has other bytes than the manifest says.
        ConfigError: the URL cannot be used.
    """
    base, remote = Path(root).resolve(), Remote(url)
    manifest = _manifest(remote, step)
    if _is_here(base, manifest, replace):
        return manifest, False
    make_folder(base / PRIVATE_FOLDER)
    lock = base / PRIVATE_FOLDER / "fetching.lock"
    with file_lock(lock, limit_s=math.inf):  # one fetch into a root at a time, however long
        if _is_here(base, manifest, replace):
            return manifest, False
        folder = step_folder(fetching_folder(base), manifest.step)
        make_folder(folder)

        def download(record: FileRecord) -> None:
            _download(remote, manifest, record, folder, lambda n: on_progress(n, manifest.nbytes))

        with ThreadPoolExecutor(parallel, "fetch") as pool:
            jobs = [pool.submit(download, record) for record in manifest.files]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for path in [*folder.rglob("*"), folder]:
            if path.is_dir():
                sync_folder(path)
        _commit(base, manifest, folder, replace)
    return manifest, True


def _manifest(remote: Remote, step: int | None) -> Manifest:
    manifest = next(remote.newest_first(), None) if step is None else remote.manifest(step)
    if manifest is None:
        what = "there is no committed step" if step is None else f"step {step} is not committed"
        raise CommitError(f"{what} at {remote.url}; trinity-sync ls {remote.url} shows what is")
    return manifest


def _is_here(root: Path, manifest: Manifest, replace: bool) -> bool:
    """Whether this very commit is here and whole; not if something is that gives way.

    Raises:
        CommitError: something else has its place.
    """
    folder = step_folder(root, manifest.step)
    revalidate_folder(root)  # another node may have fetched it just now
    if not folder.exists():
        return False
    try:
        if read_manifest(root, manifest.step) == manifest == require_committed(root, manifest.step):
            return True
        why, gives_way = (
            "is not the step of the store",
            read_run_number(root, manifest.step) < manifest.run,
        )
    except CommitError as error:
        why, gives_way = (
            f"cannot be used: {error}",
            read_run_number(root, manifest.step) <= manifest.run,
        )
    if replace and gives_way:
        return False
    raise CommitError(f"{folder} is there already and {why}. Move it away, or take another root.")


def _download(
    remote: Remote,
    manifest: Manifest,
    record: FileRecord,
    folder: Path,
    took: Callable[[int], object],
) -> None:
    path = folder / record.path
    make_folder(path.parent)
    if path.is_file() and digest_of(path) == record.digest:
        took(record.nbytes)
        return
    digest = xxhash.xxh3_128()
    path.unlink(missing_ok=True)  # a link of others', or a file of theirs that would be ours then
    with path.open("xb") as file:
        for chunk in remote.chunks(manifest.step, record.path):
            digest.update(chunk)
            file.write(chunk)
            took(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if f"{DIGEST}:{digest.hexdigest()}" != record.digest:
        path.unlink()
        raise CorruptedCopyError(
            f"{remote.url}/global_step_{manifest.step}/{record.path} is corrupted: its digest is "
            "not that of the manifest. Fetch another step, or replicate this one again."
        )


def _commit(root: Path, manifest: Manifest, folder: Path, replace: bool) -> None:
    write_manifest_into(folder, manifest)
    place = step_folder(root, manifest.step)
    with one_change_at_a_time(root) as lock:
        if not _is_here(root, manifest, replace):
            lock.require_ours()
            add_run(root, Run(manifest.run, f"fetched-step-{manifest.step}", manifest.step))
            if place.exists():
                exchange_folders(folder, place)
            else:
                folder.rename(place)
            sync_folder(root)
            shutil.rmtree(folder, ignore_errors=True)
        update_latest_pointers(root, manifest)
