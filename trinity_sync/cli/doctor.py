"""Commands that say how a node and a job are: doctor."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import AsJson, app, output, print_json, read_settings, require_existing

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command(
    rich_help_panel="Run the stack",
    epilog="Exit code 0 if nothing failed, else 1; a warning is no failure.\n\n"
    "Examples:  [bold]trinity-sync doctor[/]  ·  [bold]trinity-sync doctor ckpts --json[/]",
)
def doctor(
    root: Annotated[Path | None, typer.Argument(help="A job's folder to look at, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, server, worker, Ray, shared memory and disk; say what to do about each."""
    from rich.markup import escape

    from trinity_sync.stack.doctor import run_checks

    console = output()
    checks = []
    for check in run_checks(read_settings(), require_existing(root).resolve() if root else None):
        checks.append(check)
        if not as_json:
            colour = _COLOURS[check.state]
            console.print(
                f"[{colour}]{check.state:4}[/]  {escape(check.name)}: {escape(check.found)}",
                highlight=False,
                soft_wrap=True,
            )
            if check.todo:
                console.print(f"      {escape(check.todo)}", highlight=False, soft_wrap=True)
    if as_json:
        print_json([asdict(check) for check in checks])
    raise typer.Exit(1 if any(check.state == "fail" for check in checks) else 0)
