"""Commands about an installation: doctor, version."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli import called_from
from trinity_sync.cli.app import DONE, PROBLEM_FOUND, app, read_settings, require_existing
from trinity_sync.cli.completion import complete_root
from trinity_sync.cli.output import Output, is_text, paint, print_document, print_object
from trinity_sync.cli.rows import VersionReport

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
        if is_text(output):
            _print_check(check)
    if not is_text(output):
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


PACKAGES = ("prefect", "ray", "torch", "verl", "transformers", "lightning")
"""Packages whose versions decide how trinity-sync works."""


@app.command(
    "version", "version -o json", panel="Run the stack",
    note="The environments of the training and of the stack may differ: ENV/bin/python -m "
        "trinity_sync version prints all of another one.",
)  # fmt: skip
def version(output: Output = "table") -> None:
    """Print the versions of trinity-sync, Python, Prefect, Ray and torch, and record formats."""
    from trinity_sync import __version__
    from trinity_sync.layout import MANIFEST_FORMAT, ROOT_FORMAT, RUN_FORMAT, SPOOL_FORMAT

    report = VersionReport(
        version=__version__,
        path=str(Path(__file__).parents[1]),
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        packages={name: _find_version(name) for name in PACKAGES},
        formats={
            "root": ROOT_FORMAT,
            "spool": SPOOL_FORMAT,
            "manifest": MANIFEST_FORMAT,
            "run": RUN_FORMAT,
        },
        client=_find_client_version(),
    )
    print_object("version", report, output, lambda: _print_version(report))


def _print_version(report: VersionReport) -> None:
    formats = ", ".join(f"{name} {number}" for name, number in report.formats.items())
    lines = {
        "trinity-sync": f"{report.version} ({report.path})",
        "python": f"{report.python} ({report.executable})",
        **{name: found or "not installed" for name, found in report.packages.items()},
        "record formats": formats,
        **({"called from": report.client} if report.client else {}),
    }
    for name, text in lines.items():
        typer.echo(f"{name:14}  {text}")


def _find_client_version() -> str | None:
    """Return the version of the environment whose command executed this one."""
    if called_from == sys.executable:
        return None
    ask = "from importlib.metadata import version; print(version('trinity-sync'))"
    done = subprocess.run([called_from, "-c", ask], capture_output=True, text=True)
    return f"{done.stdout.strip() or 'unknown'} ({called_from})"


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
