"""Commands for tags: tag, untag."""

from typing import Annotated

import typer

from trinity_sync.cli.app import (
    Root,
    Yes,
    app,
    confirm,
    read_settings,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.completion import complete_step, complete_tag
from trinity_sync.cli.output import Output, print_object, print_rows, utc
from trinity_sync.cli.schema import PinRow, TagRow, Unpinned
from trinity_sync.errors import CommitError, ConfigError


@app.command(
    "tag ckpts 40 best", "tag ckpts latest best --force", "tag ckpts --list",
    panel="Keep and remove steps",
    note="Every command that takes the number of a step also takes a tag.",
)  # fmt: skip
def tag(
    root: Root,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP",
            autocompletion=complete_step,
            help="Step: its number, another tag, or latest.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Letters, digits, _ and -, e.g. best or paper-v1."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, shown in ls and report.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Move the tag from another step.")] = False,
    listed: Annotated[bool, typer.Option("--list", "-l", help="Show the tags of the job.")] = False,
    output: Output = "table",
) -> None:
    """Tag a committed step with a name, which also pins it."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    if listed:
        if step is not None:
            raise with_hint(ConfigError("--list takes no STEP"), "pass either STEP NAME or --list")
        rows = [
            TagRow(each.name, each.step, utc(each.pinned_at), each.reason or None)
            for each in pins.list_tags(require_existing(root)).values()
        ]
        print_rows("tags", rows, output, empty=f"no step in {root} has a tag")
        return
    if step is None or name is None:
        raise with_hint(
            ConfigError("a tag needs STEP NAME"),
            f"to show the tags: trinity-sync tag {root} --list",
        )
    made = pins.tag(root, resolve_step_argument(root, step), name, reason, force=force)
    try_mirror(read_settings(), root, [])
    row = PinRow(made.step, made.name, made.reason or None, utc(made.pinned_at))
    print_object("pin", row, output, f"tagged step {made.step} as {name}")


@app.command("untag ckpts best --yes", panel="Keep and remove steps")
def untag(
    root: Root,
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=complete_tag, help="The tag.")
    ],
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Remove a tag; policies may then remove its step."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    step, others = None, []
    try:
        found = pins.read_tag(require_existing(root), name)
    except CommitError as error:  # its file is torn: only removing it, or tagging again, helps
        typer.echo(f"warning: {error}", err=True)
    else:
        if found is None or not found.name:
            raise with_hint(
                ConfigError(f"no step in {root} is tagged {name}"),
                f"trinity-sync tag {root} --list",
            )
        step = found.step
    of = f"tag {name}" if step is None else f"tag {name} of step {step}"
    confirm(f"remove {of}, so that retention may remove its step", yes=yes)
    removed = pins.unpin(root, name)
    try_mirror(read_settings(), root, [])
    if step is not None:
        tags = pins.list_tags(root, skip_torn=True).values()
        others = [each.name for each in tags if each.step == step]
    print_object("pin", Unpinned(step, removed, others), output, f"removed tag {name}")
