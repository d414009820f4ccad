"""Download of a step from a remote: copy the files, compare digests, commit by one rename.

Files are written to ``root/.trinity_sync/fetching/global_step_N``, where an interrupted download
resumes. When all files are complete and durable, the folder is renamed with its manifest inside.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from trinity_sync.errors import CommitError, CorruptedCopyError
from trinity_sync.fs.atomic import (
    link_or_copy,
    make_folder,
    move,
    pinned,
    remove_file,
    revalidate_folder,
    sync_folder,
    walk_files,
)
from trinity_sync.fs.direct_io import DIGEST, OnProgress, digest_cached_file, no_progress
from trinity_sync.fs.locks import acquire_commit_lock, acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER, check_root, step_folder
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import PARALLEL, join_remote
from trinity_sync.storage.discovery import (
    latest_pointer_covers,
    read_latest_pointer,
    require_committed,
    update_latest_pointers,
)
from trinity_sync.storage.manifest import (
    FileRecord,
    Manifest,
    group_equal,
    read_manifest,
    read_run_number,
    write_manifest_into,
)
from trinity_sync.storage.persist import make_attempt_path
from trinity_sync.storage.replace import (
    clear_replaced_step,
    fetching_folder,
    replacing_folder,
    swap_folders,
    sync_folders,
)
from trinity_sync.storage.runs import FETCHED, Run, add_run


def fetch(
    url: str,
    step: int | None,
    root: str | Path,
    *,
    replace: bool = False,
    parallel: int = PARALLEL,
    on_progress: OnProgress = no_progress,
) -> tuple[Manifest, bool]:
    """Commit a step of a remote under ``root``; fetching it again is harmless.

    The root is that of the same job, or new. If the step's run is later than all runs of the root,
    the step is the newest from then on, and supersedes what earlier runs have in flight beyond it.

    ``step`` is None for the newest valid step there. ``replace`` replaces a corrupted step, or a
    step of an earlier run, of the same number. ``parallel`` files are downloaded at a time. Return
    the manifest of the step, and whether anything was downloaded.

    Raises:
        CommitError: the step is not committed there, its bytes differ from its manifest, or the
            root has another step of the same number.
        RemoteError: the remote cannot be reached or read.
        CorruptedCopyError: the remote has other bytes than the manifest says.
        ConfigError: the URL or the root cannot be used, or another job's steps are there.
    """
    check_root(root)
    base, remote = Path(root).resolve(), Remote(url)
    join_remote(base, remote)
    manifest = _find_manifest(remote, step)
    if _is_committed_here(base, manifest, replace):
        for kind in manifest.kinds:  # a download may have died before they were updated
            named = read_latest_pointer(base, kind)
            if not latest_pointer_covers(base, kind, manifest.run, manifest.step, named):
                with acquire_commit_lock(base):
                    update_latest_pointers(base, manifest)
        return manifest, False
    make_folder(base / PRIVATE_FOLDER)
    lock = base / PRIVATE_FOLDER / "fetching.lock"
    with acquire_file_lock(lock, limit_s=math.inf):  # one download into a root at a time
        if _is_committed_here(base, manifest, replace):
            return manifest, False
        folder = step_folder(fetching_folder(base), manifest.step)
        make_folder(folder)

        def download(record: FileRecord) -> None:
            make_folder((path := folder / record.path).parent)
            _download(path, remote, manifest, record, lambda n: on_progress(n, manifest.nbytes))

        groups = group_equal(manifest.files)
        with ThreadPoolExecutor(parallel, "fetch") as pool:
            list(pool.map(download, (first for first, *_ in groups)))  # an error cancels the rest
        for first, *others in groups:
            for record in others:
                path = folder / record.path
                make_folder(path.parent)
                remove_file(path)  # of an interrupted download
                link_or_copy(folder / first.path, path)
                on_progress(record.nbytes, manifest.nbytes)
        sync_folders(folder, [record.path for record in manifest.files])
        _commit(base, manifest, folder, replace)
    return manifest, True


def _find_manifest(remote: Remote, step: int | None) -> Manifest:
    manifest = (
        next(remote.iter_newest_first(), None) if step is None else remote.read_manifest(step)
    )
    if manifest is None:
        what = "there is no committed step" if step is None else f"step {step} is not committed"
        raise CommitError(f"{what} at {remote.url}; trinity-sync ls {remote.url} lists its steps")
    return manifest


def _is_committed_here(root: Path, manifest: Manifest, replace: bool) -> bool:
    """Return whether the root has this very commit, valid; False if it may be replaced.

    Raises:
        CommitError: the root has another step of the same number.
    """
    folder = step_folder(root, manifest.step)
    revalidate_folder(root)  # another node may have downloaded it
    if not folder.exists():
        return False
    number = read_run_number(root, manifest.step)
    try:
        here = require_committed(root, manifest.step)
        if read_manifest(root, manifest.step) == manifest == here:
            return True
        if here.removed and here == manifest.keep_weights():
            return False  # retention has removed the rest
        why, replaceable = "is not the step of the remote", number < manifest.run
    except CommitError as error:
        why, replaceable = f"cannot be used: {error}", number <= manifest.run
    if replace and replaceable:
        return False
    raise CommitError(f"{folder} exists already and {why}. Move it away, or choose another root.")


@pinned
def _download(
    path: Path,
    remote: Remote,
    manifest: Manifest,
    record: FileRecord,
    on_read: Callable[[int], object],
) -> None:
    # what an earlier download has named was synced before
    if path.is_file() and not path.is_symlink() and digest_cached_file(path) == record.digest:
        on_read(record.nbytes)
        return
    digest = xxhash.xxh3_128()
    temporary = make_attempt_path(path, "fetch", record.digest[-32:])
    temporary.unlink(missing_ok=True)  # never write into a link or a file of another user
    with temporary.open("xb") as file:
        for chunk in remote.read_chunks(manifest.step, record.path):
            digest.update(chunk)
            file.write(chunk)
            on_read(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if f"{DIGEST}:{digest.hexdigest()}" != record.digest:
        temporary.unlink()
        raise CorruptedCopyError(
            f"{remote.url}/global_step_{manifest.step}/{record.path} is corrupted: its digest is "
            "not that of the manifest. Fetch another step; or remove that file there and copy the "
            f"step again, from a root that has it: trinity-sync remote push ROOT {manifest.step} "
            f"{remote.url}"
        )
    temporary.replace(path)


def _commit(root: Path, manifest: Manifest, folder: Path, replace: bool) -> None:
    named = {folder / record.path for record in manifest.files}
    for path in [each for each in walk_files(folder) if each not in named]:
        remove_file(path)  # of an interrupted download of another commit
    write_manifest_into(folder, manifest)
    target = step_folder(root, manifest.step)
    with acquire_commit_lock(root) as lock:
        if not _is_committed_here(root, manifest, replace):
            lock.require_held()
            add_run(root, Run(manifest.run, f"{FETCHED}{manifest.step}", manifest.step))
            if target.exists():
                fresh = step_folder(replacing_folder(root), manifest.step)
                make_folder(fresh.parent)
                if fresh.exists():  # an earlier attempt died
                    clear_replaced_step(root, manifest.step)
                move(folder, fresh)
                swap_folders(fresh, target)
                sync_folder(root)
                clear_replaced_step(root, manifest.step)
            else:
                move(folder, target)
                sync_folder(root)
        update_latest_pointers(root, manifest)
