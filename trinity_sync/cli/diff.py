"""Command that compares two steps: diff."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trinity_sync.cli.app import DONE, PROBLEM_FOUND, Role, RootToRead, app, resolve_step_argument
from trinity_sync.cli.completion import complete_step
from trinity_sync.cli.output import Output, is_text, print_rows
from trinity_sync.cli.progress import progress_bar
from trinity_sync.cli.schema import TensorRow

if TYPE_CHECKING:
    from trinity_sync.storage.diff import TensorChange


@app.command(
    "diff ckpts 40 50", "diff ckpts latest~1 latest --component optim -o json",
    panel="Look at a job",
    note="Files are unpickled, so compare steps of your own jobs only.",
)  # fmt: skip
def diff(
    root: RootToRead,
    before: Annotated[
        str,
        typer.Argument(metavar="A", autocompletion=complete_step, help="The earlier step."),
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", autocompletion=complete_step, help="The later step.")
    ],
    role: Role = "actor",
    component: Annotated[
        Literal["model", "optim", "extra_state"], typer.Option(help="Component to compare.")
    ] = "model",
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 3 if a tensor differs.")
    ] = False,
    output: Output = "table",
) -> None:
    """Show which tensors changed between two steps, and by how much; largest change first."""
    from trinity_sync.storage import diff as diffs

    a, b = resolve_step_argument(root, before), resolve_step_argument(root, after)
    with progress_bar("comparing") as on_progress:
        changes = diffs.diff(root, a, b, role=role, component=component, on_progress=on_progress)
    rows = [_row(change) for change in changes]
    if is_text(output):
        rows = [row for row in rows if row.status != "same" or row.nonfinite]
    print_rows("tensors", rows, output)
    same = sum(change.state == "same" for change in changes)
    if is_text(output):
        typer.echo(f"{same} of {len(changes)} tensors are the same", err=True)
    raise typer.Exit(PROBLEM_FOUND if exit_code and same < len(changes) else DONE)


def _row(change: "TensorChange") -> TensorRow:
    compared = bool(change.elements) and change.state not in ("new", "missing", "reshaped")
    return TensorRow(
        name=change.name,
        status=change.state,
        shape=change.shape,
        elements=change.elements,
        changed=change.changed,
        changed_percent=change.changed_percent if compared else None,
        max_abs=_finite(change.max_abs) if compared else None,
        relative_l2=_finite(change.relative_l2) if compared else None,
        nonfinite=change.nonfinite,
    )


def _finite(value: float) -> float | None:
    """Return None for a value that JSON cannot represent."""
    return value if math.isfinite(value) else None
