"""Export requests: exports that a trainer requested with a save, for when the step is committed.

The manifest of the step has them, so a crash between the commit and an export loses none. The step
counts as committed without its export. Retention keeps the step until the weights are part of it,
but for a day at most and not after a failure: a model that cannot be exported must not fill the
disk with its steps.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trinity_sync.fs.atomic import is_own, list_uncached, open_no_follow, remove_tree
from trinity_sync.fs.file_system import read_file_system_time
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, step_folder, step_of_folder
from trinity_sync.storage.manifest import Manifest, parse_manifest, read_manifest, write_manifest

COMPONENT = "hf_model"
"""Component of the files of an exported model, in the manifest."""
EXPORT_HOLDS_S = 86_400.0
"""Seconds after its commit for which retention keeps a step with an export request."""


def is_exported(manifest: Manifest | None, role: str) -> bool:
    """Return whether a step contains the exported model of a role; False without a manifest."""
    files = manifest.files if manifest else ()
    return any((file.role, file.component) == (role, COMPONENT) for file in files)


def list_missing_exports(manifest: Manifest) -> list[str]:
    """Return the roles whose requested model is not part of a step; their export may have failed.

    ``manifest`` has the files of all ranks.
    """
    return [role for role in manifest.exports if not is_exported(manifest, role)]


def list_pending_exports(root: str | Path, manifest: Manifest) -> list[str]:
    """Return the roles whose export keeps a step: it is neither done nor failed, nor a day old."""
    roles = [r for r in list_missing_exports(manifest) if r not in manifest.failed_exports]
    ends_at = manifest.committed_at + EXPORT_HOLDS_S
    return roles if roles and read_file_system_time(root) < ends_at else []


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
    """Mark a request as failed: it no longer keeps its step, and a retry may run it again.

    Nothing is marked if a later run has committed the step, because that run exports it.
    """
    with acquire_commit_lock(root) as lock:
        manifest = read_manifest(root, step)
        if manifest and manifest.run == run:
            failed = {*manifest.failed_exports, role}
            lock.require_held()
            write_manifest(root, replace(manifest, failed_exports=tuple(sorted(failed))))


def exports_folder(root: str | Path) -> Path:
    """Return the folder of exports into steps in flight."""
    return Path(root) / PRIVATE_FOLDER / "exports"


def remove_export_files(root: str | Path, step: int) -> None:
    """Remove all files that exports into a removed step left."""
    for path in list_export_files(root, step):
        with suppress(OSError):
            remove_tree(path)


def list_export_files(root: str | Path, step: int) -> list[Path]:
    """Return the files of exports into a step, in flight or interrupted."""
    return list_uncached(exports_folder(root), f"{step_folder(root, step).name}.*")


def list_steps_with_export_files(root: str | Path) -> set[int]:
    """Return the steps for which `list_export_files` returns something."""
    names = (path.name.partition(".") for path in list_uncached(exports_folder(root), "*"))
    found = {step_of_folder(step) for step, dot, _ in names if dot}
    return {step for step in found if step is not None}
