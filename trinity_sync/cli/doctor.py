"""Command that checks a node and a job: doctor."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import DONE, PROBLEM_FOUND, app, read_settings, require_existing
from trinity_sync.cli.completion import complete_root
from trinity_sync.cli.output import Output, is_text, paint, print_rows
from trinity_sync.cli.schema import CheckRow


@app.command(
    "doctor", "doctor ckpts", "doctor ckpts -o json", panel="Run the stack",
    note="Exit code 3 if a check failed; a warning is not a failure.",
)  # fmt: skip
def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROOT", autocompletion=complete_root, help="Root of a job to check as well."
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Check versions, server, worker, Ray, shared memory and disk; suggest what to do."""
    from trinity_sync.stack.doctor import run_checks

    rows = []
    for check in run_checks(read_settings(), require_existing(job).resolve() if job else None):
        rows.append(CheckRow(check.name, check.state, check.found, check.todo or None))
        if is_text(output):
            _print_check(rows[-1])
    if not is_text(output):
        print_rows("checks", rows, output)
    raise typer.Exit(PROBLEM_FOUND if any(row.status == "fail" for row in rows) else DONE)


def _print_check(row: CheckRow) -> None:
    if not sys.stdout.isatty():
        typer.echo("\t".join((row.status, row.name, row.message, row.hint or "")))
        return
    word = paint(row.status) + " " * (4 - len(row.status))
    typer.echo(f"{word}  {row.name}: {row.message}", color=True)
    if row.hint:
        typer.echo(f"      hint: {row.hint}")
