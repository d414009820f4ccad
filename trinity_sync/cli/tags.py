"""Commands for tags: tag, untag."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    app,
    format_time,
    make_console,
    print_json,
    read_settings,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.errors import ConfigError


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Every command that takes the number of a step also takes a tag.\n\n"
    "Examples:  [bold]trinity-sync tag ckpts 40 best[/]  ·  "
    "[bold]trinity-sync tag ckpts 50 best --force[/]  ·  [bold]trinity-sync tag ckpts --list[/]",
)
def tag(
    root: Root,
    step: Annotated[str | None, typer.Argument(help="Number or another tag of the step.")] = None,
    name: Annotated[
        str | None, typer.Argument(help="Letters, digits, _ and -, such as best or paper-v1.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why the step is kept.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Move the tag from another step.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the tags of the job.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tag a committed step with a name, which also pins it."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    if listed:
        if step is not None:
            raise ConfigError("pass either STEP NAME or --list")
        found = pins.list_tags(require_existing(root))
        if as_json:
            print_json([asdict(each) for each in found.values()])
        elif not found:
            typer.echo(f"no step in {root} has a tag")
        else:
            table = Table("tag", "step", "reason", "tagged")
            table.columns[1].justify = "right"
            for each in found.values():
                tagged = format_time(each.pinned_at).replace("T", " ")
                table.add_row(each.name, str(each.step), each.reason, tagged)
            make_console().print(table)
        return
    if step is None or name is None:
        raise ConfigError("pass STEP NAME, or --list to show the tags")
    made = pins.tag(root, resolve_step_argument(root, step), name, reason, force=force)
    try_mirror(read_settings(), root, [])
    if as_json:
        print_json(asdict(made))
    else:
        typer.echo(f"tagged step {made.step} as {name}")


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Example:  [bold]trinity-sync untag ckpts best[/]",
)
def untag(root: Root, name: Annotated[str, typer.Argument(help="The tag.")]) -> None:
    """Remove a tag; policies may then remove its step."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    if name.isdecimal() or not pins.unpin(require_existing(root), name):
        raise ConfigError(
            f"no step in {root} is tagged {name}; see: trinity-sync tag {root} --list"
        )
    try_mirror(read_settings(), root, [])
    typer.echo(f"removed tag {name}")
