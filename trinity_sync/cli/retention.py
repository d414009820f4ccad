"""Commands for retention: prune, pin, unpin."""

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
    make_console,
    print_json,
    read_settings,
    require_existing,
    resolve_step_argument,
)


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Exit code 0 also if there was nothing to remove; 1 if a policy is "
    "refused.\n\nExamples:  [bold]trinity-sync prune ckpts --keep last=3 --dry-run[/]  ·  "
    "[bold]trinity-sync prune ckpts --keep last=3,every=100,best=2:reward:max[/]",
)
def prune(
    root: Root,
    keep: Annotated[
        str,
        typer.Option(
            help="Checkpoints to keep: all, last=3, every=100, hourly=24, newer=2d, ...; by "
            "default the job's setting."
        ),
    ] = "",
    keep_weights: Annotated[
        str, typer.Option(help="Steps that hold weights only to keep, in the same format.")
    ] = "",
    keep_quarantine: Annotated[
        str,
        typer.Option(help="Steps to keep in quarantine, and superseded steps, in the same format."),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove steps that no policy, pin, tag, lease or latest pointer keeps."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.retention.planner import Rules
    from trinity_sync.retention.prune import prune as prune_root
    from trinity_sync.settings import StackSettings
    from trinity_sync.storage.job_settings import read_job_settings

    settings, job = read_settings(), read_job_settings(require_existing(root))
    rules = Rules.of_job(job, keep=keep, keep_weights=keep_weights, keep_quarantine=keep_quarantine)
    done = prune_root(
        root,
        rules,
        time.time(),
        spool=settings.spool,
        recycle=StackSettings().io.reuse_files,
        dry_run=dry_run,
        on_removed=lambda steps: try_mirror(settings, root, steps),
    )
    found, freed = done.outcomes, done.nbytes
    if as_json:
        steps = [
            {
                "step": each.step.step,
                "state": each.state,
                "why": each.why,
                "bytes": each.step.nbytes,
            }
            for each in found
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
    console = make_console()
    console.print(table if found else f"nothing is committed in {root}")
    console.print(f"{format_size(freed)} {'would be ' if dry_run else ''}freed", highlight=False)
    for name in done.quarantine:
        verb = "would remove" if dry_run else "removed"
        console.print(f"{verb} {name} from the quarantine", highlight=False)


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Example:  [bold]trinity-sync pin ckpts 40 --reason 'the paper'[/]",
)
def pin(
    root: Root,
    step: Step,
    reason: Annotated[str, typer.Option(help="Why the step is kept.")] = "",
) -> None:
    """Pin a committed step: no policy removes it."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    made = pins.pin(root, resolve_step_argument(root, step), reason)
    try_mirror(read_settings(), root, [])
    typer.echo(f"pinned step {made.step}")


@app.command(
    rich_help_panel="Keep and remove steps", epilog="Example:  [bold]trinity-sync unpin ckpts 40[/]"
)
def unpin(root: Root, step: Step) -> None:
    """Unpin a step: policies may remove it again."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    number = resolve_step_argument(root, step)
    pinned = pins.unpin(root, number)
    try_mirror(read_settings(), root, [])
    typer.echo(f"unpinned step {number}" if pinned else f"step {number} was not pinned")
    if kept := [tag.name for tag in pins.list_tags(root).values() if tag.step == number]:
        typer.echo(f"it is still kept by the tag {', '.join(kept)}; see trinity-sync untag")
