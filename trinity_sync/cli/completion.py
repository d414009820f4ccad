"""Completion of ROOT and STEP by the shell: known jobs, folders, steps and tags."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import typer

from trinity_sync.errors import TrinitySyncError
from trinity_sync.layout import step_of_folder, steps_on_disk


def complete_root(incomplete: str) -> list[str]:
    """Return the roots of known jobs and the folders that begin with a text."""
    from trinity_sync.orchestration.job_registry import list_known_roots
    from trinity_sync.settings import read_settings

    found = {*_folders(incomplete)}
    with suppress(TrinitySyncError, OSError):
        found.update(map(str, list_known_roots(*read_settings())))
    return sorted(each for each in found if each.startswith(incomplete))


def complete_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the steps and tags of the job that begin with a text; the newest steps first."""
    from trinity_sync.storage.steps_in_use import list_tags

    found: list[str] = []
    with suppress(TrinitySyncError, OSError):
        root = Path(ctx.params["root"])
        found = ["latest", *list_tags(root), *map(str, reversed(steps_on_disk(root)))]
    return [each for each in found if each.startswith(incomplete)]


def _folders(incomplete: str) -> Iterator[str]:
    folder, _, start = incomplete.rpartition("/")
    base = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    with suppress(OSError):
        for path in base.iterdir():
            is_root = not path.name.startswith(".") and step_of_folder(path.name) is None
            if is_root and path.name.startswith(start) and path.is_dir():
                yield f"{folder}/{path.name}" if "/" in incomplete else path.name


def complete_setting(incomplete: str) -> list[str]:
    """Return the names of job settings that begin with a text."""
    from trinity_sync.storage.job_settings import NAMES

    return [f"{name}=" for name in NAMES if name.startswith(incomplete)]
