"""Export requests: exports that a trainer asked for with a save, for once the step is committed.

An export request is a small file, ``.trinity_sync/exports/global_step_N.<role>.request``. The
save's commit task writes it before the commit, so that a crash does not lose it, and it goes when
the weights have joined the step. The step itself counts whether or not it is exported. Until then
retention leaves it, but no longer than a day and not after a failure: a model that cannot be
exported must not fill the disk with its steps.
"""

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import list_uncached, make_folder, replace_file
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.records import STACK, Count, Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT, step_folder, step_of_folder
from trinity_sync.snapshot.safe_load import is_own, open_no_follow
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

COMPONENT = "hf_model"
"""Of the files of an exported model, in the manifest."""
EXPORT_HOLDS_S = 86_400.0
"""Seconds for which an export request keeps its step from retention."""


@dataclass(frozen=True)
class ExportRequest(Record, format=ROOT_FORMAT, writer=STACK):
    """One role's model of one step is to be exported into the step."""

    run: Count
    step: Count
    role: str
    trust_remote_code: bool = False
    """Whether source files of the model may be imported."""
    failed: bool = False
    """Whether it was tried; a retry of its save renews it."""


def exports_folder(root: str | Path) -> Path:
    """Return the folder of export requests, and of exports in flight into a step."""
    return Path(root) / PRIVATE_FOLDER / "exports"


def write_export_request(root: str | Path, request: ExportRequest) -> None:
    """Write an export request, durably; again is harmless.

    Args:
        root: the job's root.
        request: what is to be exported.
    """
    path = _path(root, request.step, request.role)
    make_folder(path.parent)
    replace_file(path, encode_record(request), mode=0o644)


def list_export_requests(root: str | Path, *, step: int | None = None) -> list[ExportRequest]:
    """Return the export requests of a step, or of all; those that cannot be read are skipped.

    In those that somebody else may have written, no source files are trusted.
    """
    found = []
    of = "" if step is None else f"{step_folder(root, step).name}."
    for path in list_uncached(exports_folder(root), f"{of}*.request"):
        try:
            request = _read(path)
        except FileNotFoundError:
            continue  # exported meanwhile
        except FormatError as error:
            logger.warning("%s", error)
            continue
        except (OSError, ValueError) as error:
            logger.warning("%s is no request for an export, and is skipped: %s", path, error)
            continue
        if path == _path(root, request.step, request.role):  # its name says where it leads
            found.append(request)
    return found


def fail_export_request(root: str | Path, request: ExportRequest) -> None:
    """Mark a request as failed: its step is held no longer, a retry may find it.

    Nothing is marked where the step is a later run's by now, which exports it.

    Args:
        root: the job's root.
        request: which one.
    """
    waiting = [
        each for each in list_export_requests(root, step=request.step) if each.role == request.role
    ]
    if not any(each.run > request.run for each in waiting):
        write_export_request(root, replace(request, failed=True))


def inherit_export_requests(root: str | Path, step: int, run: int, to: int) -> None:
    """Have a later run, whose step it is now, inherit the pending export requests of a run.

    Args:
        root: the job's root.
        step: that both runs have committed.
        run: the earlier one.
        to: the later one.
    """
    for request in list_export_requests(root, step=step):
        if request.run == run and not request.failed:
            write_export_request(root, replace(request, run=to))


def steps_awaiting_export(root: str | Path) -> dict[int, list[str]]:
    """Return the steps whose export is pending, with the roles.

    That of another release counts as pending: only that release knows.
    """
    found: dict[int, list[str]] = {}
    failed = {
        _path(root, request.step, request.role)
        for request in list_export_requests(root)
        if request.failed
    }
    waiting = [
        path for path in list_uncached(exports_folder(root), "*.request") if path not in failed
    ]
    now = file_time(root) if waiting else 0.0
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
    """Remove an export request.

    Args:
        root: the job's root.
        step: of the request.
        role: of the request.
    """
    _path(root, step, role).unlink(missing_ok=True)


def remove_export_files(root: str | Path, step: int) -> None:
    """Remove all that exports left of a step that is gone: requests, and half-written files."""
    for path in exports_of(root, step):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def exports_of(root: str | Path, step: int) -> list[Path]:
    """What there is of a step's exports, granted, under way or broken off."""
    return list_uncached(exports_folder(root), f"{step_folder(root, step).name}.*")


def exported_steps(root: str | Path) -> set[int]:
    """The steps of which `exports_of` finds something."""
    names = (path.name.partition(".") for path in list_uncached(exports_folder(root), "*"))
    found = {step_of_folder(step) for step, dot, _ in names if dot}
    return {step for step in found if step is not None}


def is_exported(manifest: Manifest | None, role: str) -> bool:
    """Whether a step holds the exported model of a role."""
    files = manifest.files if manifest else ()
    return any((file.role, file.component) == (role, COMPONENT) for file in files)


def _read(path: Path) -> ExportRequest:
    with open_no_follow(path) as file:
        own = is_own(file.fileno())
        request = decode_record(ExportRequest, file.read(), path)
    return replace(request, trust_remote_code=request.trust_remote_code and own)


def _path(root: str | Path, step: int, role: str) -> Path:
    return exports_folder(root) / f"{step_folder(root, step).name}.{role}.request"
