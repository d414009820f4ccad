"""Export of one role of a committed step as a Hugging Face model, into the step or another folder.

Into the step, the weights are written next to it, renamed into
``global_step_N/<role>/huggingface/`` and added to its manifest, under the commit lock. Elsewhere, a
complete folder appears by one rename, which ``from_pretrained`` loads.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_sync.errors import CommitError, ConfigError, ExportError
from trinity_sync.formats.hf_files import DTYPES, HUGGINGFACE, find_adapter_config, write_files
from trinity_sync.formats.hf_naming import require_config
from trinity_sync.formats.safetensors import ExportProgress, open_progress, read_progress
from trinity_sync.formats.shard_reader import SavedState
from trinity_sync.fs.atomic import (
    UNWRITABLE,
    is_own,
    make_folder,
    move,
    open_no_follow,
    remove_file,
    sync_folder,
)
from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.fs.locks import acquire_commit_lock, try_acquire_file_lock
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, check_name, step_folder
from trinity_sync.storage.discovery import list_shards, require_committed, require_unreplaced
from trinity_sync.storage.manifest import (
    EXPORTED,
    FileRecord,
    Manifest,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from trinity_sync.storage.restore import require_digests
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.storage.uncommitted import exports_folder


@dataclass(frozen=True)
class ExportResult:
    """Folder of an export, and the paths of its files below it."""

    folder: Path
    files: tuple[str, ...]
    nbytes: int


def export_step(
    root: str | Path,
    step: int,
    *,
    to: Path | None = None,
    role: str = "actor",
    dtype: str = "keep",
    max_shard_bytes: int = 5_000_000_000,
    check: bool = True,
    trust_remote_code: bool = False,
    on_progress: OnProgress = no_progress,
) -> ExportResult:
    """Export a model that FSDP ranks saved as a Hugging Face folder; exporting again is harmless.

    ``to`` is a folder that is missing, empty, or an earlier export; by default the step's own.
    ``dtype`` is ``keep``, for the trained dtype, or a key of `DTYPES`. ``check`` compares the
    digests of the shards with the manifest before. ``trust_remote_code`` lets source files of the
    model be imported. ``on_progress`` is called with bytes and their total: of digests, then of
    written files.

    Memory holds one file of weights at a time, of ``max_shard_bytes`` or one larger tensor. An
    interrupted export resumes.

    Raises:
        CommitError: the step is not committed or corrupted, or has no model of this role, or its
            shards cannot be put together.
        ConfigError: an argument is invalid.
        ExportError: the tensors are not those of a model that can be exported.
        OSError: the disk is full or broken; the next call uses what is written.
    """
    if dtype not in ("keep", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not keep, {', '.join(DTYPES)}")
    if to is None and dtype != "keep":
        raise ConfigError("an export into the step keeps the dtype; pass another FOLDER")
    root = Path(root).resolve()
    check_name("role", role)
    manifest = require_committed(root, step)
    folder = step_folder(root, step)
    records = list_shards(root, manifest, role, "model")
    for record in records:
        if not (folder / record.path).resolve().is_relative_to(folder.resolve()):
            raise CommitError(
                f"{folder / record.path} is outside of the step's folder; export another step"
            )
    source = {
        "root": str(root),
        "step": step,
        "run": manifest.run,
        "role": role,
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "digests": [record.digest for record in records],
    }
    target = folder / role / HUGGINGFACE if to is None else check_target(to, root)
    if to is None:
        scratch = exports_folder(root) / f"{folder.name}.{role}"
    else:
        scratch = target.with_name(f".{target.name}.partial")
    with lease_to_read(root, step, f"export of {role}"), lock_export(root, scratch):
        done = read_progress(scratch if to is None else target)
        if done and done.source == source and _is_whole(root, done, in_step=to is None):
            return _make_result(target, done)
        progress = _write(
            root,
            manifest,
            records,
            source,
            scratch,
            in_step=to is None,
            check=check,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        if to is None:
            _add_to_step(root, manifest, role, progress)
        else:
            replace_target(scratch, target)
    return _make_result(target, progress)


def _is_whole(root: Path, done: ExportProgress, *, in_step: bool) -> bool:
    """Return whether all files of an earlier export are still there."""
    step, role = done.source["step"], done.source["role"]
    committed = {r.path: r.digest for r in require_committed(root, step).files}
    return bool(done.files) and all(
        committed.get(f"{role}/{HUGGINGFACE}/{name}") == known.digest
        if in_step
        else done.has_file(name)
        for name, known in done.files.items()
    )


def _write(
    root: Path,
    manifest: Manifest,
    records: Sequence[FileRecord],
    source: dict[str, Any],
    scratch: Path,
    *,
    in_step: bool,
    check: bool,
    trust_remote_code: bool,
    on_progress: OnProgress,
) -> ExportProgress:
    """Write the files of an export, or what an interrupted one has not, from shards of one run."""
    role, folder = source["role"], step_folder(root, manifest.step)
    adapter_config = find_adapter_config(folder, manifest, role)
    if adapter_config is None:
        require_config(folder / role / HUGGINGFACE)  # before all files are read
    compared = sum(record.nbytes for record in records) if check else 0
    if check:
        require_digests(folder, records, lambda n: on_progress(n, 2 * compared))
    progress = open_progress(scratch, source)
    try:
        write_files(
            progress,
            SavedState([folder / record.path for record in records]),
            folder / role,
            adapter_config,
            max_bytes=source["max_shard_bytes"],
            trust_remote_code=trust_remote_code,
            small=[] if in_step else _list_metadata_files(manifest, role),
            on_progress=lambda n, written: on_progress(n, compared + written),
        )
    except (FileNotFoundError, CommitError, ExportError):
        require_unreplaced(root, manifest)  # files may be missing in a replaced step
        raise
    require_unreplaced(root, manifest)  # all shards that were read are of one run
    return progress


def run_export_request(root: str | Path, run: int, step: int, role: str) -> None:
    """Export a model as requested; its digests were just computed, so they are not compared again.

    Raises:
        CommitError, ExportError, OSError: as `export_step`; a retry of the save exports it again.
    """
    try:
        trusted = allows_remote_code(root, step, role)
        export_step(root, step, role=role, check=False, trust_remote_code=trusted)
    except Exception:
        fail_export_request(root, run, step, role)
        raise


def allows_remote_code(root: str | Path, step: int, role: str) -> bool:
    """Return whether the request of an export lets source files of the model be imported.

    A manifest that another user may have written does not.
    """
    path = step_folder(root, step) / MANIFEST
    with open_no_follow(path) as file:
        own = is_own(file.fileno())
        manifest = parse_manifest(file.read(), path, step)
    return own and manifest.exports.get(role) == "hf_model with remote code"


def fail_export_request(root: str | Path, run: int, step: int, role: str) -> None:
    """Mark a request as failed, unless a later run has committed the step, which exports it."""
    with acquire_commit_lock(root) as lock:
        manifest = read_manifest(root, step)
        if manifest and manifest.run == run:
            failed = {*manifest.failed_exports, role}
            lock.require_held()
            write_manifest(root, replace(manifest, failed_exports=tuple(sorted(failed))))


def _add_to_step(root: Path, manifest: Manifest, role: str, progress: ExportProgress) -> None:
    """Rename the weights into the step's folder, and add them to its manifest."""
    step = manifest.step
    folder = step_folder(root, step)
    with acquire_commit_lock(root) as lock:
        now = read_manifest(root, step)
        if now is None or now.run != manifest.run:
            raise CommitError(
                f"step {step} in {root} was replaced or removed during its export and is not "
                "changed. Export it again."
            )
        lock.require_held()
        # the index comes last, after the files that it names
        names = sorted(progress.files, key=lambda name: name.endswith(".json"))
        records = [
            FileRecord(f"{role}/{HUGGINGFACE}/{name}", each.nbytes, each.digest, role, EXPORTED)
            for name, each in ((name, progress.files[name]) for name in names)
        ]
        stale = {f.path for f in now.files if (f.role, f.component) == (role, EXPORTED)}
        kept = replace(
            now,
            files=tuple(file for file in now.files if file.path not in stale),
            failed_exports=tuple(each for each in now.failed_exports if each != role),
        )
        if any(now.find_file(each.path) not in (None, each) for each in records):
            write_manifest(root, kept)  # no file that it names may change
        for name, record in zip(names, records, strict=True):
            path = folder / record.path
            make_folder(path.parent)
            move(progress.folder / name, path)
            sync_folder(path.parent)
        lock.require_held()
        write_manifest(root, kept.merge(replace(kept, files=tuple(records), callables=())))
        for each in stale.difference(record.path for record in records):
            remove_file(folder / each)


def _make_result(folder: Path, progress: ExportProgress) -> ExportResult:
    nbytes = sum(known.nbytes for known in progress.files.values())
    return ExportResult(folder, tuple(sorted(progress.files)), nbytes)


def _list_metadata_files(manifest: Manifest, role: str) -> list[str]:
    prefix = f"{role}/{HUGGINGFACE}/"
    return [
        record.path.removeprefix(prefix)
        for record in manifest.files
        if record.path.startswith(prefix) and record.component == "metadata"
    ]


def check_target(to: Path, root: Path) -> Path:
    """Return the absolute path of the folder to export to, given as the user passed it.

    Raises:
        ConfigError: it contains other files, or is part of the job.
    """
    target = to.absolute().resolve()
    if target == root or target in root.parents or target.is_relative_to(root / PRIVATE_FOLDER):
        raise ConfigError(f"{to} is or contains the job itself; export to another folder")
    inside = target.relative_to(root).parts[0] if target.is_relative_to(root) else ""
    if inside.startswith("global_step_"):
        raise ConfigError(
            f"{to} is part of a step; omit --to to export into the step, or choose another folder"
        )
    if target.exists():
        ours = target.is_dir() and read_progress(target) is not None
        if not target.is_dir() or (any(target.iterdir()) and not ours):
            raise ConfigError(
                f"{to} is not empty and not an earlier export; nothing was changed. Choose another "
                "folder, or remove it."
            )
    return target


@contextmanager
def lock_export(root: Path, scratch: Path) -> Iterator[None]:
    """Hold the lock of an export target within the block; a root that cannot be written has none.

    Raises:
        ExportError: another export holds it.
    """
    exports = exports_folder(root)
    name = hashlib.sha256(os.fsencode(scratch)).hexdigest()[:16]
    lock = exports / f"{scratch.name if scratch.parent == exports else name}.lock"
    with ExitStack() as held:
        try:
            acquired = held.enter_context(try_acquire_file_lock(lock))
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            acquired = True
        if not acquired:
            raise ExportError(
                f"another export to the same folder is in flight ({scratch}); wait until it ends"
            )
        yield


def replace_target(scratch: Path, target: Path) -> None:
    """Rename a finished export to its target, and remove an earlier export there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    scratch.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
