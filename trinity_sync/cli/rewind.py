"""Command that makes an earlier step the newest: rewind."""

from typing import Annotated

import typer

from trinity_sync.cli.app import AsJson, Root, app, print_json, read_settings, resolve_step_argument


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Exit code 1, and no change, if a newer step is leased, pinned or tagged, or the "
    "answer is no.\n\nTo undo it, rename the folders back and rewind to the newest of them.\n\n"
    "Examples:  [bold]trinity-sync rewind ckpts --to 40[/]  ·  "
    "[bold]trinity-sync rewind ckpts --to 40 --yes[/]",
)
def rewind(
    root: Root,
    to: Annotated[str, typer.Option(help="Number or tag of the committed step to go back to.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Quarantine pinned and tagged steps as well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an earlier step the newest; newer steps are quarantined, not deleted."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage.rewind import list_newer_steps
    from trinity_sync.storage.rewind import rewind as rewind_to

    step = resolve_step_argument(root, to)
    newer = list_newer_steps(root, step)
    if not yes:
        what = "update the latest pointers"
        if newer:
            what = f"quarantine {len(newer)} newer steps ({_join_steps(newer)})"
        typer.confirm(f"rewind {root} to step {step}: {what}?", abort=True, err=True)
    done = rewind_to(root, step, force=force)
    try_mirror(read_settings(), root, done.quarantined)
    if as_json:
        where = str(done.folder) if done.folder else None
        print_json(
            {"step": step, "run": done.run, "quarantined": done.quarantined, "folder": where}
        )
        return
    typer.echo(f"{root} is at step {step}; the next run resumes from there")
    if done.folder:
        typer.echo(f"in quarantine: steps {_join_steps(list(done.quarantined))}, in {done.folder}")


def _join_steps(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
