"""Command that writes an HTML report of a job: report."""

from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import Root, app, read_settings, require_existing
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file


@app.command(
    rich_help_panel="Look at a job",
    epilog="Durations, failures and retention decisions come from the Prefect server, if one "
    "answers.\n\nExamples:  [bold]trinity-sync report ckpts[/]  ·  "
    "[bold]trinity-sync report ckpts --output /tmp/ckpts.html[/]",
)
def report(
    root: Root,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write an HTML page about a job: steps, durations, failures, readers. It needs no network."""
    from trinity_sync.cli.report_html import render_report
    from trinity_sync.orchestration.report import collect_report

    if output.is_dir():
        raise ConfigError(f"{output} is a folder; pass a file as --output")
    page = render_report(collect_report(read_settings(), require_existing(root)))
    try:
        replace_file(output, page, sync=False)
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}: {error.strerror}; pass another --output"
        ) from error
    typer.echo(f"wrote {output}; open it in a browser")
