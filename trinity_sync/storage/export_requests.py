"""Exports that a trainer asked for with a save: carried out once the step is committed.

A wish is a small file, ``.trinity_sync/exports/global_step_N.<role>.wish``. The save's commit task
writes it before the commit, so that it outlives whatever dies after it, and it goes when the
weights have joined the step. The step itself counts whether or not its wishes come true. Until then
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
from trinity_sync.snapshot.safe_load import is_own, open_file
from trinity_sync.storage.manifest import Manifest

logger = logging.getLogger(__name__)

COMPONENT = "hf_model"
"""Of the files of an exported model, in the manifest."""
AWAITED_S = 86_400.0
"""Seconds for which a wish keeps its step from retention."""


@dataclass(frozen=True)
class Wish(Record, format=ROOT_FORMAT, writer=STACK):
    """One role's model of one step is to be exported into the step."""

    run: Count
    step: Count
    role: str
    trust_remote_code: bool = False
    """Whether source files of the model may be imported."""
    failed: bool = False
    """Whether it was tried; a retry of its save renews it."""


def exports_folder(root: str | Path) -> Path:
    """Where wishes are, and exports on their way into a step."""
    return Path(root) / PRIVATE_FOLDER / "exports"


def make_wish(root: str | Path, wish: Wish) -> None:
    """Note a wish, durably; again is harmless."""
    path = _path(root, wish.step, wish.role)
    make_folder(path.parent)
    replace_file(path, encode_record(wish), mode=0o644)


def wishes(root: str | Path, *, step: int | None = None) -> list[Wish]:
    """The wishes that wait, of one step or of all; those that cannot be read are passed over.

    In those that somebody else may have written, no source files are trusted.
    """
    found = []
    of = "" if step is None else f"{step_folder(root, step).name}."
    for path in list_uncached(exports_folder(root), f"{of}*.wish"):
        try:
            wish = _read(path)
        except FileNotFoundError:
            continue  # granted meanwhile
        except FormatError as error:
            logger.warning("%s", error)
            continue
        except (OSError, ValueError) as error:
            logger.warning("%s is no request for an export, and is passed over: %s", path, error)
            continue
        if path == _path(root, wish.step, wish.role):  # its name says where it leads
            found.append(wish)
    return found


def give_up(root: str | Path, wish: Wish) -> None:
    """Note that a wish could not be granted: its step is held no longer, a retry may find it.

    Nothing is noted where the step is a later run's by now, which grants the wish.
    """
    waiting = [each for each in wishes(root, step=wish.step) if each.role == wish.role]
    if not any(each.run > wish.run for each in waiting):
        make_wish(root, replace(wish, failed=True))


def pass_on_wishes(root: str | Path, step: int, run: int, to: int) -> None:
    """Have a later run, whose step it is now, grant the wishes of a run that still wait."""
    for wish in wishes(root, step=step):
        if wish.run == run and not wish.failed:
            make_wish(root, replace(wish, run=to))


def awaited(root: str | Path) -> dict[int, list[str]]:
    """The steps whose export is still to come, with the roles.

    One that another release asked for is taken to wait: only that release knows.
    """
    found: dict[int, list[str]] = {}
    given_up = {_path(root, wish.step, wish.role) for wish in wishes(root) if wish.failed}
    waiting = [
        path for path in list_uncached(exports_folder(root), "*.wish") if path not in given_up
    ]
    now = file_time(root) if waiting else 0.0
    for path in waiting:
        folder, _, role = path.stem.partition(".")
        try:
            age = now - path.stat().st_mtime
        except FileNotFoundError:
            continue  # granted meanwhile
        if age < AWAITED_S and (step := step_of_folder(folder)) is not None:
            found.setdefault(step, []).append(role)
    return found


def forget_wish(root: str | Path, step: int, role: str) -> None:
    """Remove a wish, come true or not."""
    _path(root, step, role).unlink(missing_ok=True)


def forget_exports(root: str | Path, step: int) -> None:
    """Remove all that exports have left of a step that is gone: wishes, and files half written."""
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


def _read(path: Path) -> Wish:
    with open_file(path) as file:
        own = is_own(file.fileno())
        wish = decode_record(Wish, file.read(), path)
    return replace(wish, trust_remote_code=wish.trust_remote_code and own)


def _path(root: str | Path, step: int, role: str) -> Path:
    return exports_folder(root) / f"{step_folder(root, step).name}.{role}.wish"
