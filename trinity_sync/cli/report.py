"""Commands that show a job as a whole: report."""

from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import Root, app, read_settings, require_existing
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file


@app.command(
    rich_help_panel="Look at a job",
    epilog="Durations, failures and retention's decisions come from the Prefect server, if one "
    "answers.\n\nExamples:  [bold]trinity-sync report ckpts[/]  ·  "
    "[bold]trinity-sync report ckpts --output /tmp/ckpts.html[/]",
)
def report(
    root: Root,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about a job that needs no network: steps, times, failures, readers."""
    from trinity_sync.cli.report_html import render_report
    from trinity_sync.orchestration.report import collect_report

    if output.is_dir():
        raise ConfigError(f"{output} is a folder; pass the name of a file as --output")
    page = render_report(collect_report(read_settings(), require_existing(root)))
    try:
        replace_file(output, page, sync=False)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror}; pass another --output"
        ) from error
    typer.echo(f"{output}: open it in a browser")
