"""Command that shows which version of the weights each reader serves: readers."""

import time
from pathlib import Path

import typer

from trinity_sync.cli.app import RootToRead, app, require_existing
from trinity_sync.cli.output import Output, format_age, print_object, print_table, utc
from trinity_sync.cli.schema import ReaderRow, ReadersReport


@app.command("readers ckpts", "readers -o json", panel="Look at a job")
def readers(root: RootToRead, output: Output = "table") -> None:
    """Show which reader serves which version of the weights, and how stale it is."""
    report = _read_report(root)
    print_object("readers", report, output, lambda: _print_report(report, str(root), output))


def _read_report(root: Path) -> ReadersReport | None:
    from trinity_sync.weights.report import read_sync_report

    now = time.time()
    found = read_sync_report(require_existing(root), now)
    if found and found.lives is False:  # what it knew then says nothing about now
        now = found.written_at
        found = read_sync_report(root, now)
    if found is None:
        return None
    newest = found.newest
    return ReadersReport(
        version=newest.step if newest else None,
        run=newest.run if newest else None,
        source=newest.source if newest else None,
        running=found.lives,
        as_of=utc(now),
        trainer=found.trainer,
        explorers=found.explorers,
        readers=[
            ReaderRow(each.name, each.step, each.run, each.behind, utc(each.since), each.stale_s)
            for each in found.readers
        ],
    )


def _print_report(report: ReadersReport | None, root: str, output: Output) -> None:
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
    age = format_age(time.time() - report.as_of.timestamp())
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
        print_table(ReaderRow, report.readers, output)
