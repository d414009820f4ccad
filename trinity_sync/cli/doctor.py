"""Command that checks a node and a job: doctor."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import (
    AsJson,
    app,
    make_console,
    print_json,
    read_settings,
    require_existing,
)

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command(
    rich_help_panel="Run the stack",
    epilog="Exit code 0 if no check failed, otherwise 1; a warning is not a failure.\n\n"
    "Examples:  [bold]trinity-sync doctor[/]  ·  [bold]trinity-sync doctor ckpts --json[/]",
)
def doctor(
    root: Annotated[Path | None, typer.Argument(help="Root of a job to check as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, server, worker, Ray, shared memory and disk; suggest what to do."""
    from rich.markup import escape

    from trinity_sync.stack.doctor import run_checks

    console = make_console()
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
