"""Command that prints what is installed: version."""

import sys
from importlib import metadata
from pathlib import Path

import typer

from trinity_sync.cli.app import app
from trinity_sync.cli.output import Output, print_object
from trinity_sync.cli.schema import VersionReport

PACKAGES = ("prefect", "ray", "torch", "verl", "transformers", "lightning")
"""Packages whose versions decide how trinity-sync works."""


@app.command(
    "version", "version -o json", panel="Run the stack",
    note="The environments of the training and of the stack may differ; run it in both, in the "
        "other one with its path: ENV/bin/python -m trinity_sync.cli version.",
)  # fmt: skip
def version(output: Output = "table") -> None:
    """Print the versions of trinity-sync, Python, Prefect, Ray and torch, and record formats."""
    from trinity_sync import __version__
    from trinity_sync.layout import ROOT_FORMAT, SPOOL_FORMAT

    report = VersionReport(
        version=__version__,
        path=str(Path(__file__).parents[1]),
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        packages={name: _find_version(name) for name in PACKAGES},
        formats={"root": ROOT_FORMAT, "spool": SPOOL_FORMAT},
    )
    print_object("version", report, output, lambda: _print_version(report))


def _print_version(report: VersionReport) -> None:
    formats = ", ".join(f"{name} {number}" for name, number in report.formats.items())
    lines = {
        "trinity-sync": f"{report.version} ({report.path})",
        "python": f"{report.python} ({report.executable})",
        **{name: found or "not installed" for name, found in report.packages.items()},
        "record formats": formats,
    }
    for name, text in lines.items():
        typer.echo(f"{name:14}  {text}")


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
