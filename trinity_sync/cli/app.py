"""The Typer app, its common arguments, error handling and output formats.

Commands import heavy packages (torch, Prefect, Ray) when they need them, so that help and ``ls``
are instant. An error is a single sentence on stderr and exit code 1.
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


class _CommandGroup(typer.core.TyperGroup):
    """Prints an error as a sentence instead of a traceback, and exits on Ctrl-C as shells do."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
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
    cls=_CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checkpoints for RL post-training: run the stack, inspect and manage checkpoints.\n\n"
    "Settings of the stack are in trinity_sync.toml (trinity-sync config show); TRINITY_SYNC_HOME "
    "is its folder, and PREFECT_API_URL names an external server.",
    epilog="Examples:  [bold]trinity-sync up[/]  ·  [bold]trinity-sync status[/]  ·  "
    "[bold]trinity-sync ls ckpts[/]  ·  [bold]trinity-sync show ckpts 40[/]  ·  "
    "[bold]trinity-sync down[/]",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Root = Annotated[
    Path, typer.Argument(help="Root of the job, which holds the global_step_N folders.")
]
Step = Annotated[
    str,
    typer.Argument(metavar="STEP", help="Number or tag of the step."),
]


def read_settings() -> "Settings":
    """Read the settings of the environment.

    Raises:
        ConfigError: A value is invalid.
    """
    from trinity_sync.settings import Settings

    return Settings()


def require_existing(root: Path) -> Path:
    """Return the root of a job.

    Raises:
        ConfigError: It is not a folder.
    """
    refuse_url(root)
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder; pass the job's root, e.g. trinity-sync ls ckpts"
        )
    return root


def resolve_step_argument(root: Path, step: str) -> int:
    """Return the number of a step.

    Args:
        root: Root of the job.
        step: Number or tag of the step.

    Raises:
        ConfigError: The root is not a folder, or the job has no such tag.
    """
    from trinity_sync.storage.pins import resolve_step

    return resolve_step(require_existing(root), step)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def make_console() -> Console:
    """Return a console that does not truncate lines in a file or pipe."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def format_size(nbytes: int) -> str:
    """Format a number of bytes, such as ``5.0 GB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_time(seconds: float) -> str:
    """Format seconds since the epoch as local time, to the second."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
