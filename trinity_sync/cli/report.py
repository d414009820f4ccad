"""Commands that describe a job: readers, report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import Root, app, read_settings, require_existing
from trinity_sync.cli.output import Output, format_time, print_document, print_object, print_table
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.orchestration.quantities import format_bytes, format_duration

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
    "report ckpts", "report ckpts --html /tmp/ckpts.html", "report ckpts -o json",
    panel="Look at a job",
    note="Failures, flow runs and verifications come from the Prefect server, if one answers.",
)  # fmt: skip
def report(
    root: Root,
    html: Annotated[Path, typer.Option("--html", help="File to write.")] = Path("report.html"),
    output: Output = "table",
) -> None:
    """Write an HTML page about a job: its health, failures with what to type, cost of saves.

    With -o json no page is written.
    """
    from trinity_sync.orchestration.report.collect import collect_report

    if html.is_dir():
        raise ConfigError(f"{html} is a folder; pass a file as --html")
    found = collect_report(read_settings(), require_existing(root))
    if output == "json":
        print_document("report", found)
        return
    try:
        replace_file(html, render_report(found), sync=False)
    except OSError as error:
        raise ConfigError(f"cannot write {html}: {error.strerror}; pass another --html") from error
    typer.echo(f"{found.health.status}: {found.health.sentence}")
    typer.echo(f"wrote {html}; open it in a browser")


OPEN_ROWS = 20
"""Steps that are shown at once."""
MAX_ROWS = 500
"""Steps that are listed in all; a browser takes long for more."""


def render_report(report: "JobReport") -> str:
    """Return the report of a job as one HTML page that loads nothing else."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("trinity_sync", "cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=format_bytes, time=format_time, duration=format_duration)
    newest_first = sorted(report.steps, key=lambda row: (row.run or 0, row.step), reverse=True)
    return environment.get_template("report.html.j2").render(
        report=report,
        figures=summarize(report),
        shown=newest_first[:OPEN_ROWS],
        more=newest_first[OPEN_ROWS:MAX_ROWS],
        left_out=max(len(newest_first) - MAX_ROWS, 0),
    )


def summarize(report: "JobReport") -> dict[str, str]:
    """Return the key figures of a job by their captions."""
    figures = {}
    newest: dict[str, int] = {}
    for kind, name in (("checkpoint", "newest checkpoint"), ("state_dict", "newest weights")):
        steps = [row for row in report.steps if kind in row.kinds and row.is_loadable]
        row = max(steps, key=lambda row: (row.run or 0, row.step), default=None)
        if row and row.step not in newest.values():  # a checkpoint has weights, too
            newest[name] = row.step
            age = max(report.created_at - (row.committed_at or 0.0), 0.0)
            figures[name] = f"step {row.step}, {format_duration(age)} ago"
    checkpoints = [each for each in report.saves if each.timing.kind == "checkpoint"]
    saves = (checkpoints or list(report.saves))[-20:]
    longest = [each.timing.longest_stall for each in saves]
    if stalls := sorted(each.seconds for each in longest if each):
        figures["median stall"] = format_duration(stalls[len(stalls) // 2])
    if totals := sorted(each.timing.total_s for each in saves):
        figures["median to commit"] = format_duration(totals[len(totals) // 2])
    if report.disk:
        figures["on disk"] = format_bytes(report.disk.nbytes)
        figures["disk free"] = format_bytes(report.disk.free_bytes)
    return figures
