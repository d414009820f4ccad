"""Commands that decide which steps stay: prune, pin, unpin."""

import time
from typing import Annotated

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    Step,
    app,
    format_size,
    output,
    print_json,
    read_settings,
    require_existing,
    resolve_step_argument,
)


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Exit code 0 if it was done, also if nothing was to be removed; 1 if a policy is "
    "refused.\n\nExamples:  [bold]trinity-sync prune ckpts --keep last=3 --dry-run[/]  ·  "
    "[bold]trinity-sync prune ckpts --keep last=3,every=100,best=2:reward:max[/]",
)
def prune(
    root: Root,
    keep: Annotated[
        str | None,
        typer.Option(help="Checkpoints to keep: all, last=3, every=100, hourly=24, newer=2d, ..."),
    ] = None,
    keep_syncs: Annotated[
        str | None, typer.Option(help="Steps of weights only to keep, likewise.")
    ] = None,
    keep_quarantine: Annotated[
        str | None,
        typer.Option(
            help="Folders in quarantine to keep, and steps of a training that was begun again."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove steps that no policy, pin, tag, lease or pointer keeps, once newer ones are valid."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.retention.planner import Rules
    from trinity_sync.retention.policies import parse_policy
    from trinity_sync.retention.prune import prune as prune_root

    settings = read_settings()
    quarantine = parse_policy(
        settings.keep_quarantine if keep_quarantine is None else keep_quarantine
    )
    rules = Rules(
        parse_policy(settings.keep if keep is None else keep),
        parse_policy(settings.keep_syncs if keep_syncs is None else keep_syncs),
        superseded=quarantine,
        quarantine=quarantine,
    )
    done = prune_root(
        require_existing(root),
        rules,
        time.time(),
        spool=settings.spool,
        recycle=settings.recycle,
        dry_run=dry_run,
        on_removed=lambda steps: try_mirror(settings, root, steps),
    )
    found, freed = done.outcomes, done.nbytes
    if as_json:
        steps = [
            {"step": v.step.step, "state": v.state, "why": v.why, "bytes": v.step.nbytes}
            for v in found
        ]
        print_json(
            {
                "dry_run": dry_run,
                "bytes_freed": freed,
                "steps": steps,
                "quarantine": done.quarantine,
            }
        )
        return
    table = Table("step", "size", "state", "why")
    table.columns[0].justify = table.columns[1].justify = "right"
    for each in found:
        table.add_row(str(each.step.step), format_size(each.step.nbytes), each.state, each.why)
    console = output()
    console.print(table if found else f"nothing is committed in {root}")
    console.print(f"{format_size(freed)} {'would be ' if dry_run else ''}freed", highlight=False)
    for name in done.quarantine:
        what = f"{name} in quarantine {'would be' if dry_run else 'is'} removed"
        console.print(what, highlight=False)


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Example:  [bold]trinity-sync pin ckpts 40 --reason 'the paper'[/]",
)
def pin(
    root: Root,
    step: Step,
    reason: Annotated[str, typer.Option(help="Why, for who wonders later.")] = "",
) -> None:
    """Keep a committed step until it is unpinned, whatever policies say."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    made = pins.pin(root, resolve_step_argument(root, step), reason)
    try_mirror(read_settings(), root, [])
    typer.echo(f"step {made.step} is pinned")


@app.command(
    rich_help_panel="Keep and remove steps", epilog="Example:  [bold]trinity-sync unpin ckpts 40[/]"
)
def unpin(root: Root, step: Step) -> None:
    """Let the policies decide about a pinned step again."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    number = resolve_step_argument(root, step)
    pinned = pins.unpin(root, number)
    try_mirror(read_settings(), root, [])
    typer.echo(f"step {number} {'is not pinned any more' if pinned else 'was not pinned'}")
    if kept := [tag.name for tag in pins.list_tags(root).values() if tag.step == number]:
        typer.echo(f"it is kept by the tag {', '.join(kept)}; see trinity-sync untag")
