"""Committed weights: the versions and folders that manifests name, and how new ones are noticed.

Commits are noticed through files alone, in any process, with or without Ray. A commit replaces the
manifest of its step, then the latest pointer. Two stats tell whether either file was replaced, and
only then is anything read. The pointer says where to look first; manifests decide, so an empty,
torn or late pointer costs a scan of all manifests and nothing else. A commit only moves the pointer
forward: no commit is newer than the one it names, except one that died before it moved the pointer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.fs.atomic import FileSignature, list_paths, read_signature, revalidate_folder
from trinity_sync.fs.file_system import find_mount
from trinity_sync.layout import ITERATION_FILES, MANIFEST, step_folder
from trinity_sync.snapshot.identity import IDENTITY_FILE, read_identity
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    read_latest_pointer,
    read_manifest_state,
)
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import Run, is_superseded
from trinity_sync.weights.versions import Version

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
"""Files that Hugging Face's and Trinity's loaders prefer to shards."""


def iter_committed_weights(
    root: str | Path, role: str, step: int | None = None
) -> Iterator[Manifest]:
    """Yield the valid commits with the weights of a role, newest first, without superseded ones.

    With ``step``, only that one is looked at. Manifests decide; latest pointers are not read, so an
    empty pointer does no harm.

    Raises:
        FormatError: another release has committed a step, or begun a run.
    """
    steps = iter_committed_steps(root, None if step is None else [step])
    found = [manifest for manifest in steps if _has_weights(manifest, role)]
    for manifest in sorted(found, key=lambda m: (m.run, m.step), reverse=True):
        try:
            if not is_superseded(root, manifest.run, manifest.step):
                yield _require_weights(root, manifest, role)
        except CommitError as error:
            logger.warning("%s", error)


def find_committed_version(root: str | Path, role: str, step: int | None = None) -> Version | None:
    """Return the first of `iter_committed_weights` as a version; None if there is none."""
    identity = read_identity(root)  # first: the root may be recreated meanwhile
    return next(
        (
            name_commit(root, manifest, role, identity)
            for manifest in iter_committed_weights(root, role, step)
        ),
        None,
    )


def name_commit(root: str | Path, manifest: Manifest, role: str, identity: str) -> Version:
    """Return the weights of a role in a commit as a version of the job of this identity."""
    step, run, key = manifest.step, manifest.run, manifest.run_key
    return Version(step, run, "checkpoint", str(root), role, identity=identity, run_key=key)


def find_model_path(root: str | Path, role: str, *, use_huggingface: bool = False) -> Path | None:
    """Return the newest folder to load weights from, as Trinity's ``get_latest_model_path``.

    It is ``global_step_N/{role}``, or with ``use_huggingface`` its ``huggingface`` folder if the
    commit put full weights there; None if there is none. A folder is skipped if it has a file of
    weights that is older than the commit and not part of it: loaders prefer such a file to the
    newer shards next to it.
    """
    for manifest in iter_committed_weights(root, role):
        folder = step_folder(root, manifest.step) / role
        committed = {step_folder(root, manifest.step) / record.path for record in manifest.files}
        if stale := _find_stale_file(folder, committed, manifest.committed_at):
            logger.warning(
                "skipping step %d in %s: %s is older than its commit and not part of it, and "
                "loaders would prefer it. Remove that file.",
                manifest.step,
                root,
                stale,
            )
            continue
        if not use_huggingface:
            return folder
        inner = folder / "huggingface"
        if any(path in committed for path in _list_weight_files(inner)):
            return inner
    return None


def _require_weights(root: str | Path, manifest: Manifest, role: str) -> Manifest:
    """Return the manifest of a step if its files of a role's weights are not corrupted.

    Optimizer states and the like, which no reader of weights opens, are not looked at.
    """
    paths = {
        file.path
        for file in manifest.files
        if file.role == role and (file.component == "model" or not file.is_shard)
    }
    return read_manifest_state(root, manifest, runs=(), paths=paths).require_loadable()


def _has_weights(manifest: Manifest, role: str) -> bool:
    is_of_role = any(file.role == role and file.is_weights for file in manifest.files)
    return is_of_role and manifest.serves("state_dict")


def _find_stale_file(folder: Path, committed: set[Path], committed_at: float) -> Path | None:
    for path in [*_list_weight_files(folder), *_list_weight_files(folder / "huggingface")]:
        if path not in committed and path.stat().st_mtime < committed_at:
            return path
    return None


def _list_weight_files(folder: Path) -> list[Path]:
    return [path for pattern in WEIGHT_FILES for path in list_paths(folder, pattern)]


MIN_POLL_S, POLL_S = 0.005, 0.1
"""Limits of the seconds between two polls of a folder in memory, each one stat; the latter also for
a root that no other node sees."""
SHARED_POLL_S = 1.0
"""Seconds between two polls of a shared file system, whose server answers each of them."""
SCAN_S = 30.0
"""Seconds between two scans of all manifests: a commit may die before it moves the pointer."""
RETRY_S = 1.0
"""Seconds before commits or versions that could not be read are read again."""

CommitSignature = tuple[FileSignature, FileSignature, FileSignature]
"""Of the latest pointer, of the manifest of the step that it names, and of the job's identity."""
Signature = tuple[FileSignature, CommitSignature]
"""Of the folder with a node's images, which changes with their version tags, and of the commits."""


class CommitNotification:
    """Notices changes of the newest committed weights of a role, and finds them.

    Any number of threads may use it. The root may be created later.
    """

    def __init__(self, root: str | Path, role: str) -> None:
        self._root, self._role = Path(root), role
        self._is_shared = find_mount(root).shared
        self.poll_s = SHARED_POLL_S if self._is_shared else POLL_S
        """Seconds between two polls of a process that waits."""
        self._pointer = self._root / ITERATION_FILES["state_dict"]
        self._pointed: tuple[FileSignature, int | None] = (None, None)
        """The pointer that was read last, and the step that it names."""
        self._cached: tuple[tuple[CommitSignature, frozenset[Run]], Version | None] | None = None

    def read_signature(self) -> CommitSignature:
        """Return a signature that changes with every commit of weights, and with the job."""
        identity = self._read_file_signature(self._root / IDENTITY_FILE)
        pointer = self._read_file_signature(self._pointer)
        known, step = self._pointed
        if pointer != known:
            step = None
            with suppress(OSError):
                step = read_latest_pointer(self._root, "state_dict")
            self._pointed = pointer, step
        if step is None:
            return pointer, None, identity
        manifest = step_folder(self._root, step) / MANIFEST
        return pointer, self._read_file_signature(manifest), identity

    def find_newest(self, runs: Iterable[Run], *, scan: bool = False) -> Version | None:
        """Return the newest committed version that no later run has superseded.

        ``runs`` are all runs of the job. Nothing is read unless there was a commit or a run began.
        The first call, and any with ``scan``, reads all manifests.
        """
        state = self.read_signature(), frozenset(runs)
        cached = self._cached
        if cached and cached[0] == state and not scan:
            return cached[1]
        found, step = None, self._pointed[1]
        if cached and not scan and step is not None:
            found = find_committed_version(self._root, self._role, step)
        if found is None:
            found = find_committed_version(self._root, self._role)
        self._cached = state, found
        return found

    async def wait_for_change(
        self,
        since: Signature | None,
        within_s: float = SCAN_S,
        read_images: Callable[[], FileSignature] | None = None,
    ) -> Signature:
        """Wait until the signature differs from ``since``; return it, at the latest ``within_s``.

        ``read_images`` returns the signature of a folder in memory. It is called at intervals of a
        twentieth of the time that has passed.
        """
        began = polled = now = time.monotonic()
        commits = await asyncio.to_thread(self.read_signature)
        while True:
            signature = read_images() if read_images else None, commits
            if signature != since or now - began >= within_s:
                return signature
            elapsed_s = now - began
            pause_s = min(max(MIN_POLL_S, elapsed_s / 20), POLL_S) if read_images else self.poll_s
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            if now - polled >= self.poll_s:
                polled, commits = now, await asyncio.to_thread(self.read_signature)

    def _read_file_signature(self, path: Path) -> FileSignature:
        if self._is_shared:
            revalidate_folder(path.parent)
        return read_signature(path)
