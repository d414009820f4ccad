"""Command that compares two steps: diff."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from trinity_sync.cli.app import AsJson, Root, app, make_console, print_json, resolve_step_argument
from trinity_sync.cli.progress import progress_bar

if TYPE_CHECKING:
    from trinity_sync.storage.diff import TensorChange


@app.command(
    rich_help_panel="Look at a job",
    epilog="Files are unpickled, so compare steps of your own jobs only.\n\n"
    "Examples:  [bold]trinity-sync diff ckpts 40 50[/]  ·  "
    "[bold]trinity-sync diff ckpts 40 50 --component optim --json[/]",
)
def diff(
    root: Root,
    before: Annotated[str, typer.Argument(metavar="A", help="Number or tag of the earlier step.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Number or tag of the later step.")],
    role: Annotated[str, typer.Option(help="Role to compare.")] = "actor",
    component: Annotated[str, typer.Option(help="model, optim or extra_state.")] = "model",
    as_json: AsJson = False,
) -> None:
    """Show which tensors changed between two steps, and by how much; largest change first."""
    from trinity_sync.storage import diff as diffs

    a, b = resolve_step_argument(root, before), resolve_step_argument(root, after)
    with progress_bar("comparing") as on_progress:
        changes = diffs.diff(root, a, b, role=role, component=component, on_progress=on_progress)
    if as_json:
        print_json([_as_json(change) for change in changes])
        return
    table = Table("tensor", "state", "shape", "changed", "max abs", "relative L2", "not finite")
    for column in (3, 4, 5, 6):
        table.columns[column].justify = "right"
    for change in changes:
        if change.state == "same" and not change.nonfinite:
            continue
        compared = change.elements and change.state not in ("new", "missing", "reshaped")
        table.add_row(
            change.name,
            change.state,
            change.shape,
            f"{change.changed_percent:.2f} %" if compared else "",
            f"{change.max_abs:.3g}" if compared else "",
            f"{change.relative_l2:.3g}" if compared else "",
            str(change.nonfinite or ""),
        )
    console = make_console()
    if table.row_count:
        console.print(table)
    same = sum(change.state == "same" for change in changes)
    console.print(f"{same} of {len(changes)} tensors are the same", highlight=False)


def _as_json(change: "TensorChange") -> dict[str, Any]:
    return {
        "name": change.name,
        "state": change.state,
        "shape": change.shape,
        "elements": change.elements,
        "changed": change.changed,
        "changed_percent": change.changed_percent,
        "max_abs": _finite(change.max_abs),
        "relative_l2": _finite(change.relative_l2),
        "nonfinite": change.nonfinite,
    }


def _finite(value: float) -> float | None:
    """Return None for a value that JSON cannot represent."""
    return value if math.isfinite(value) else None
