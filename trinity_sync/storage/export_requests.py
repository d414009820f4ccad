"""Export requests: exports that a trainer requested with a save, for when the step is committed.

An export request is a small file, ``.trinity_sync/exports/global_step_N.<role>.request``. The
save's commit task writes it before the commit, so that a crash does not lose it; it is removed
when the weights are part of the step. The step counts as committed without its export. Retention
keeps the step until then, but for a day at most and not after a failure: a model that cannot be
exported must not fill the disk with its steps.
"""

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync.fs.atomic import list_uncached, make_folder, replace_file
from trinity_sync.fs.mounts import read_file_system_time
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, step_folder, step_of_folder
from trinity_sync.storage.manifest import Manifest
from trinity_sync.tensors.safe_load import is_own, open_no_follow

logger = logging.getLogger(__name__)

COMPONENT = "hf_model"
"""Component of the files of an exported model, in the manifest."""
EXPORT_HOLDS_S = 86_400.0
"""Seconds for which retention keeps a step with an export request."""


@dataclass(frozen=True)
class ExportRequest(Record):
    """Request to export one role's model of a step into the step."""

    run: Count
    step: Count
    role: str
    trust_remote_code: bool = False
    """Whether source files of the model may be imported."""
    failed: bool = False
    """Whether the export failed; a retry of its save resets it."""


def exports_folder(root: str | Path) -> Path:
    """Return the folder of export requests, and of exports into steps in flight."""
    return Path(root) / PRIVATE_FOLDER / "exports"


def write_export_request(root: str | Path, request: ExportRequest) -> None:
    """Write an export request, durably; writing it again is harmless."""
    path = _path(root, request.step, request.role)
    make_folder(path.parent)
    replace_file(path, encode_record(request), mode=0o644)


def list_export_requests(root: str | Path, *, step: int | None = None) -> list[ExportRequest]:
    """Return the export requests of a step, or of all steps; skip those that cannot be read.

    A request that another user may have written does not allow remote code.
    """
    found = []
    prefix = "" if step is None else f"{step_folder(root, step).name}."
    for path in list_uncached(exports_folder(root), f"{prefix}*.request"):
        try:
            request = _read(path)
        except FileNotFoundError:
            continue  # exported meanwhile
        except (OSError, ValueError) as error:
            logger.warning("skipping %s, which is not an export request: %s", path, error)
            continue
        if path == _path(root, request.step, request.role):  # its name must agree with its content
            found.append(request)
    return found


def fail_export_request(root: str | Path, request: ExportRequest) -> None:
    """Mark a request as failed: it no longer keeps its step, and a retry may run it again.

    Nothing is marked if a later run has committed the step, because that run exports it.
    """
    waiting = [
        each for each in list_export_requests(root, step=request.step) if each.role == request.role
    ]
    if not any(each.run > request.run for each in waiting):
        write_export_request(root, replace(request, failed=True))


def inherit_export_requests(root: str | Path, step: int, run: int, to: int) -> None:
    """Make the pending export requests of a run for a step those of the later run ``to``."""
    for request in list_export_requests(root, step=step):
        if request.run == run and not request.failed:
            write_export_request(root, replace(request, run=to))


def list_steps_awaiting_export(root: str | Path) -> dict[int, list[str]]:
    """Return the steps with pending exports, and their roles."""
    found: dict[int, list[str]] = {}
    failed = {
        _path(root, request.step, request.role)
        for request in list_export_requests(root)
        if request.failed
    }
    waiting = [
        path for path in list_uncached(exports_folder(root), "*.request") if path not in failed
    ]
    now = read_file_system_time(root) if waiting else 0.0
    for path in waiting:
        folder, _, role = path.stem.partition(".")
        try:
            age = now - path.stat().st_mtime
        except FileNotFoundError:
            continue  # exported meanwhile
        if age < EXPORT_HOLDS_S and (step := step_of_folder(folder)) is not None:
            found.setdefault(step, []).append(role)
    return found


def remove_export_request(root: str | Path, step: int, role: str) -> None:
    """Remove an export request."""
    _path(root, step, role).unlink(missing_ok=True)


def remove_export_files(root: str | Path, step: int) -> None:
    """Remove all files that exports left of a removed step: requests and partial exports."""
    for path in list_export_files(root, step):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def list_export_files(root: str | Path, step: int) -> list[Path]:
    """Return the files of a step's exports: requests, and exports in flight or interrupted."""
    return list_uncached(exports_folder(root), f"{step_folder(root, step).name}.*")


def list_steps_with_export_files(root: str | Path) -> set[int]:
    """Return the steps for which `list_export_files` returns something."""
    names = (path.name.partition(".") for path in list_uncached(exports_folder(root), "*"))
    found = {step_of_folder(step) for step, dot, _ in names if dot}
    return {step for step in found if step is not None}


def is_exported(manifest: Manifest | None, role: str) -> bool:
    """Return whether a step contains the exported model of a role; False without a manifest."""
    files = manifest.files if manifest else ()
    return any((file.role, file.component) == (role, COMPONENT) for file in files)


def _read(path: Path) -> ExportRequest:
    with open_no_follow(path) as file:
        own = is_own(file.fileno())
        request = decode_record(ExportRequest, file.read(), path)
    return replace(request, trust_remote_code=request.trust_remote_code and own)


def _path(root: str | Path, step: int, role: str) -> Path:
    return exports_folder(root) / f"{step_folder(root, step).name}.{role}.request"
