"""The command's frame: the app itself, errors as sentences, and how values are printed.

What is heavy (torch, Prefect, Ray) is imported by the commands that need it, so that help and
``ls`` are instant. Errors that a user can mend are one sentence on stderr and exit code 1.
"""

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

from trinity_sync.errors import ConfigError, TrinitySyncError
from trinity_sync.layout import refuse_url

if TYPE_CHECKING:
    from trinity_sync.settings import Settings


class _Plain(typer.core.TyperGroup):
    """Errors as a sentence instead of a traceback; Ctrl-C as the shell expects it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (TrinitySyncError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"trinity-sync: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Plain,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checkpoints for RL training: run the stack that saves them, look at what was saved.\n\n"
    "Settings come from the environment: TRINITY_SYNC_HOME is the stack's folder, PREFECT_API_URL "
    "and TRINITY_SYNC_RAY_ADDRESS name a server and a Ray cluster to use instead of starting them.",
    epilog="Examples:  [bold]trinity-sync up[/]  ·  [bold]trinity-sync status[/]  ·  "
    "[bold]trinity-sync ls ckpts[/]  ·  [bold]trinity-sync show ckpts 40[/]  ·  "
    "[bold]trinity-sync down[/]",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Root = Annotated[
    Path, typer.Argument(help="The job's folder, which holds the global_step_N folders.")
]
Step = Annotated[
    str,
    typer.Argument(metavar="STEP", help="Number of the step, or a tag of it."),
]


def read_settings() -> "Settings":
    """The settings of the environment; a value that cannot be used is a `ConfigError`."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from trinity_sync.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        wrong = "; ".join(
            f"TRINITY_SYNC_{str(each['loc'][0]).upper()}={each['input']}: {each['msg']}"
            for each in error.errors()
        )
        raise ConfigError(f"settings cannot be used: {wrong}. Correct or unset them.") from error
    except SettingsError as error:
        raise ConfigError(f"settings cannot be used: {error}. Correct or unset them.") from error


def require_existing(root: Path) -> Path:
    """The job's root, if there is such a folder; else a `ConfigError`."""
    refuse_url(root)
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder; pass the job's root, e.g. trinity-sync ls ckpts"
        )
    return root


def resolve_step_argument(root: Path, step: str) -> int:
    """The step of a job that was named by its number or a tag; else a `ConfigError`."""
    from trinity_sync.storage.pins import resolve_step

    return resolve_step(require_existing(root), step)


def print_json(value: Any) -> None:
    """Print a value for a program to read."""
    typer.echo(json.dumps(value, indent=1))


def output() -> Console:
    """A console that cuts nothing when its output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def format_size(nbytes: int) -> str:
    """A number of bytes for a person to read."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_time(seconds: float) -> str:
    """Seconds since the epoch as local time, to the second."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
