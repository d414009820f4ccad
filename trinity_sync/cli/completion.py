"""Completion of ROOT and STEP by the shell: known jobs, folders, steps and tags."""

from collections.abc import Iterator
from pathlib import Path

import typer

from trinity_sync.layout import step_of_folder


def complete_root(incomplete: str) -> list[str]:
    """Return the roots of known jobs and the folders that begin with a text."""
    found = {*_known_roots(), *_folders(incomplete)}
    return sorted(each for each in found if each.startswith(incomplete))


def complete_step(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the steps and tags of the job that begin with a text; the newest steps first."""
    return [each for each in _steps(ctx) if each.startswith(incomplete)]


def _known_roots() -> list[str]:
    from trinity_sync.cli.app import read_settings
    from trinity_sync.errors import TrinitySyncError
    from trinity_sync.orchestration.job_registry import list_known_roots

    try:
        return [str(root) for root in list_known_roots(read_settings())]
    except (TrinitySyncError, OSError):
        return []


def _folders(incomplete: str) -> Iterator[str]:
    folder, _, start = incomplete.rpartition("/")
    base = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    try:
        for path in base.iterdir():
            is_root = not path.name.startswith(".") and step_of_folder(path.name) is None
            if is_root and path.name.startswith(start) and path.is_dir():
                yield f"{folder}/{path.name}" if "/" in incomplete else path.name
    except OSError:
        return


def _steps(ctx: typer.Context) -> list[str]:
    """Return the steps and tags of the command's root."""
    from trinity_sync.errors import TrinitySyncError
    from trinity_sync.layout import steps_on_disk
    from trinity_sync.storage.steps_in_use import list_tags

    try:
        root = Path(ctx.params["root"])
        return ["latest", *list_tags(root), *map(str, reversed(steps_on_disk(root)))]
    except (TrinitySyncError, OSError):
        return []


def complete_setting(incomplete: str) -> list[str]:
    """Return the names of job settings that begin with a text."""
    from trinity_sync.storage.job_settings import NAMES

    return [f"{name}=" for name in NAMES if name.startswith(incomplete)]
