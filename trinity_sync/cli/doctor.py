"""The command that checks an installation: doctor."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import DONE, PROBLEM_FOUND, app, read_settings, require_existing
from trinity_sync.cli.completion import complete_root
from trinity_sync.cli.output import Output, paint, print_document

if TYPE_CHECKING:
    from trinity_sync.stack.doctor_job import Check


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
    """Check versions, savers, shared memory, disk, and a stack that is used; suggest what to do."""
    from trinity_sync.stack.doctor import run_checks

    checks = []
    for check in run_checks(read_settings(), require_existing(job).resolve() if job else None):
        checks.append(check)
        if output == "table":
            _print_check(check)
    if output == "json":
        print_document("checks", checks)
    raise typer.Exit(PROBLEM_FOUND if any(each.state == "fail" for each in checks) else DONE)


def _print_check(check: "Check") -> None:
    if not sys.stdout.isatty():
        typer.echo("\t".join((check.state, check.name, check.found, check.todo)))
        return
    word = paint(check.state) + " " * (4 - len(check.state))
    typer.echo(f"{word}  {check.name}: {check.found}", color=True)
    if check.todo:
        typer.echo(f"      hint: {check.todo}")
