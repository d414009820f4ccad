"""Commands that describe a job: readers, report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import Root, app, read_settings, require_existing
from trinity_sync.cli.completion import complete_root
from trinity_sync.cli.output import Output, print_document, print_object, print_table
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.orchestration.quantities import format_duration

if TYPE_CHECKING:
    from trinity_sync.orchestration.report.facts import JobReport
    from trinity_sync.weights.state_files import SyncReport


@app.command("readers ckpts", "readers ckpts -o json", panel="Look at a job")
def readers(root: Root, output: Output = "table") -> None:
    """Show which reader serves which version of the weights, and how stale it is."""
    from trinity_sync.weights.state_files import read_sync_report

    report = read_sync_report(require_existing(root), time.time())
    print_object("readers", report, output, lambda: _print_report(report, str(root)))


def _print_report(report: "SyncReport | None", root: str) -> None:
    if report is None:
        typer.echo(
            f"no Synchronizer has worked in {root}; readers without one do not report which "
            "version they serve",
            err=True,
        )
        return
    version = "none"
    if report.version is not None:
        version = f"{report.version} of run {report.run}, from {report.source}"
    age = format_duration(max(time.time() - report.as_of, 0.0))
    state = {
        True: "running",
        False: f"not running, as of {age} ago",
        None: "on another host",
    }[report.running]
    typer.echo(f"newest version: {version}")
    typer.echo(f"trainer: {report.trainer}; Synchronizer: {state}")
    for name, status in report.explorers.items():
        typer.echo(f"explorer {name}: {status}")
    if report.running is False:
        typer.echo("hint: trainer and explorers start it again by Synchronizer.get_actor", err=True)
    if report.readers:
        typer.echo("")
        print_table(report.readers, "name step run behind since stale_s")


@app.command(
    "report ckpts", "report ckpts --html /tmp/ckpts.html", "report ckpts -o json", "report",
    "report exp1/ckpts exp2/ckpts",
    panel="Look at a job",
    note="Failures, flow runs and verifications come from the Prefect server, if one answers.",
)  # fmt: skip
def report(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[ROOT...]",
            autocompletion=complete_root,
            help="Roots of jobs; by default all that have saved on this node.",
        ),
    ] = None,
    html: Annotated[Path, typer.Option("--html", help="File to write.")] = Path("report.html"),
    output: Output = "table",
) -> None:
    """Write an HTML page about a job: its health, failures with what to type, cost of saves.

    Without ROOT, the page lists all jobs, and links the page of each, which is written next to it;
    with several, it also shows them side by side. With -o json no page is written, and the reports
    of several jobs are a list.
    """
    from trinity_sync.cli.report_html import render_report, render_reports
    from trinity_sync.orchestration.report.collect import collect_report, collect_reports

    if html.is_dir():
        raise ConfigError(f"{html} is a folder; pass a file as --html")
    settings = read_settings()
    found = [collect_report(settings, require_existing(root)) for root in roots or ()]
    is_one, found = len(found) == 1, found or collect_reports(settings)
    if output == "json":
        print_document("report" if is_one else "reports", found[0] if is_one else found)
        return

    def name_page(report: "JobReport") -> str:
        return html.name if is_one else f"{html.stem}-{report.job}.html"

    try:
        for each in found:
            replace_file(html.with_name(name_page(each)), render_report(each), sync=False)
            typer.echo(
                f"{each.root}: " * (not is_one) + f"{each.health.status}: {each.health.sentence}"
            )
        if not is_one:
            page = render_reports(found, name_page, compare=bool(roots))
            replace_file(html, page, sync=False)
    except OSError as error:
        raise ConfigError(f"cannot write {html}: {error.strerror}; pass another --html") from error
    typer.echo(f"wrote {html}; open it in a browser")
