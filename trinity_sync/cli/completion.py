"""Completion of ROOT and STEP by the shell: known jobs, folders, steps and tags."""

from collections.abc import Iterator
from pathlib import Path

import typer

from trinity_sync.layout import step_of_folder


def complete_root(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the roots of known jobs and the folders that begin with a text.

    A command that takes a step as well also offers the steps of the default root.
    """
    found = [*_known_roots(), *_folders(incomplete)]
    takes_step = any(each.name in ("step", "before") for each in ctx.command.params)
    if takes_step and not incomplete.startswith((".", "/")):
        found += _steps(ctx)
    return sorted({each for each in found if each.startswith(incomplete)})


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
    """Return the steps and tags of the command's root, or of its default."""
    from trinity_sync.errors import TrinitySyncError
    from trinity_sync.layout import steps_on_disk
    from trinity_sync.storage.pins import list_tags

    try:
        base = Path(_find_root(ctx))
        return ["latest", *list_tags(base), *map(str, reversed(steps_on_disk(base)))]
    except (TrinitySyncError, OSError):
        return []


def _find_root(ctx: typer.Context) -> str:
    """Return the root of the line, or the one that the command has if it is left out.

    Raises:
        ConfigError: There is none.
    """
    source = ctx.get_parameter_source("root")
    if source and source.name == "COMMANDLINE":
        return str(ctx.params["root"])
    defaults = [each.default for each in ctx.command.params if each.name == "root"]
    return next((str(each()) for each in defaults if callable(each)), ".")


def complete_setting(incomplete: str) -> list[str]:
    """Return the names of job settings that begin with a text."""
    from trinity_sync.storage.job_settings import NAMES

    return [f"{name}=" for name in NAMES if name.startswith(incomplete)]


def complete_tag(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the tags of the job that begin with a text."""
    found = [each for each in _steps(ctx) if not each.isdecimal()]
    return [each for each in found if each.startswith(incomplete) and each != "latest"]
