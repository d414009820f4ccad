"""Command that shows the versions of the weights: weights."""

import time
from dataclasses import asdict

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    app,
    format_time,
    make_console,
    print_json,
    require_existing,
)

LIVES = {True: "runs", False: "not reachable", None: "on another host"}


@app.command(
    rich_help_panel="Look at a job",
    epilog="Examples:  [bold]trinity-sync weights ckpts[/]  ·  "
    "[bold]trinity-sync weights ckpts --json[/]",
)
def weights(root: Root, as_json: AsJson = False) -> None:
    """Show which reader serves which version of the weights, and how stale it is."""
    from trinity_sync.weights.report import read_sync_report

    found = read_sync_report(require_existing(root), time.time())
    if as_json:
        print_json(asdict(found) if found else None)
        return
    if found is None:
        typer.echo(
            f"no Synchronizer has worked in {root}; readers without one do not report which "
            "version they serve"
        )
        return
    newest = found.newest
    console = make_console()
    version = f"{newest.step} of run {newest.run}, from {newest.source}" if newest else "none"
    console.print(f"newest version: {version}", highlight=False)
    console.print(
        f"trainer: {found.trainer}; Synchronizer: {LIVES[found.lives]}, "
        f"last change {format_time(found.written_at).replace('T', ' ')}",
        highlight=False,
    )
    if found.lives is False:
        console.print(
            "What follows is what it knew then. Trainer and explorers start it again by "
            "Synchronizer.get_actor.",
            highlight=False,
        )
    table = Table("reader", "version", "run", "since", "steps behind", "stale for")
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
    for reader in found.readers:
        table.add_row(
            reader.name,
            str(reader.step),
            str(reader.run),
            format_time(reader.since).replace("T", " "),
            str(reader.behind),
            f"{reader.stale_s:.0f} s",
        )
    if found.readers:
        console.print(table)
    if found.explorers:
        states = Table("explorer", "status")
        for name, status in found.explorers.items():
            states.add_row(name, status)
        console.print(states)
