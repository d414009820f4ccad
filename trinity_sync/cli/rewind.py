"""Commands that change which step is the newest: rewind."""

from typing import Annotated

import typer

from trinity_sync.cli.app import AsJson, Root, app, print_json, read_settings, resolve_step_argument


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Exit code 1 if a newer step is leased, pinned or tagged, or the answer is no; nothing "
    "is changed then.\n\nTo undo it, rename the folders back and rewind to the newest of them.\n\n"
    "Examples:  [bold]trinity-sync rewind ckpts --to 40[/]  ·  "
    "[bold]trinity-sync rewind ckpts --to 40 --yes[/]",
)
def rewind(
    root: Root,
    to: Annotated[str, typer.Option(help="The committed step to go back to, or a tag of it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Pinned and tagged steps, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an earlier step the newest; newer ones are quarantined, and nothing is deleted."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage.rewind import list_newer_steps
    from trinity_sync.storage.rewind import rewind as carry_out

    step = resolve_step_argument(root, to)
    newer = list_newer_steps(root, step)
    if not yes:
        what = f"quarantine {len(newer)} newer steps ({_listed(newer)})" if newer else "point at it"
        typer.confirm(f"rewind {root} to step {step}: {what}?", abort=True, err=True)
    done = carry_out(root, step, force=force)
    try_mirror(read_settings(), root, done.quarantined)
    if as_json:
        where = str(done.folder) if done.folder else None
        print_json(
            {"step": step, "run": done.run, "quarantined": done.quarantined, "folder": where}
        )
        return
    typer.echo(f"{root} is at step {step}; a training that resumes goes on from there")
    if done.folder:
        typer.echo(f"in quarantine: steps {_listed(list(done.quarantined))}, in {done.folder}")


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
