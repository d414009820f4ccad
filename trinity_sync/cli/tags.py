"""Commands that give steps names: tag, untag."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    app,
    format_time,
    output,
    print_json,
    read_settings,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.errors import ConfigError


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="A tag may be given wherever a command takes the number of a step.\n\n"
    "Examples:  [bold]trinity-sync tag ckpts 40 best[/]  ·  "
    "[bold]trinity-sync tag ckpts 50 best --force[/]  ·  [bold]trinity-sync tag ckpts --list[/]",
)
def tag(
    root: Root,
    step: Annotated[
        str | None, typer.Argument(help="Number of the step, or another tag of it.")
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="Letters, digits, _ and -, such as best or paper-v1.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for who wonders later.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Move the tag if it is at another step.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the tags of the job.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a committed step a name; it is kept as if it were pinned, until the tag is gone."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    if listed:
        if step is not None:
            raise ConfigError("say either which step to tag, STEP NAME, or --list")
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
            output().print(table)
        return
    if step is None or name is None:
        raise ConfigError("say which step and what name, STEP NAME, or --list to see the tags")
    made = pins.tag(root, resolve_step_argument(root, step), name, reason, force=force)
    try_mirror(read_settings(), root, [])
    if as_json:
        print_json(asdict(made))
    else:
        typer.echo(f"step {made.step} is tagged {name}")


@app.command(
    rich_help_panel="Keep and remove steps",
    epilog="Example:  [bold]trinity-sync untag ckpts best[/]",
)
def untag(root: Root, name: Annotated[str, typer.Argument(help="The tag.")]) -> None:
    """Remove a tag; the policies decide about its step again, unless it is held otherwise."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    if name.isdecimal() or not pins.unpin(require_existing(root), name):
        raise ConfigError(
            f"no step in {root} is tagged {name}; see: trinity-sync tag {root} --list"
        )
    try_mirror(read_settings(), root, [])
    typer.echo(f"{name} is no tag any more")
