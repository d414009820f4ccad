"""Command that reports on a job, as an HTML page or JSON: report."""

from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import RootToRead, app, read_settings, require_existing
from trinity_sync.cli.output import Output, print_object
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file


@app.command(
    "report ckpts", "report ckpts --html /tmp/ckpts.html", "report ckpts -o json",
    panel="Look at a job",
    note="Failures, flow runs and verifications come from the Prefect server, if one answers.",
)  # fmt: skip
def report(
    root: RootToRead,
    html: Annotated[Path, typer.Option("--html", help="File to write.")] = Path("report.html"),
    output: Output = "table",
) -> None:
    """Write an HTML page about a job: its health, failures with what to type, cost of saves.

    With -o json no page is written.
    """
    from trinity_sync.cli.report_html import render_report
    from trinity_sync.orchestration.report.collect import collect_report
    from trinity_sync.orchestration.report.facts import to_json

    if html.is_dir():
        raise ConfigError(f"{html} is a folder; pass a file as --html")
    found = collect_report(read_settings(), require_existing(root))
    if output in ("json", "jsonl"):
        print_object("report", to_json(found), output)
        return
    try:
        replace_file(html, render_report(found), sync=False)
    except OSError as error:
        raise ConfigError(f"cannot write {html}: {error.strerror}; pass another --html") from error
    if output == "name":
        typer.echo(html)
        return
    typer.echo(f"{found.health.status}: {found.health.sentence}")
    typer.echo(f"wrote {html}; open it in a browser")
