"""Command that shows and records metrics of a step: metrics."""

from typing import Annotated

import typer

from trinity_sync.cli.app import Root, Step, app, read_settings, resolve_step_argument, with_hint
from trinity_sync.cli.output import Output, print_rows
from trinity_sync.cli.schema import MetricRow
from trinity_sync.errors import ConfigError


@app.command(
    "metrics ckpts latest", "metrics ckpts 30 reward=0.8 kl=0.01", panel="Keep and remove steps",
    note="Policies such as keep=best=2:reward:max read them. The training may be running.",
)  # fmt: skip
def metrics(
    root: Root,
    step: Step,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Metrics to record; without them, show."),
    ] = None,
    output: Output = "table",
) -> None:
    """Show the metrics of a step, or record some."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.client.checkpoints import Checkpoints

    number = resolve_step_argument(root, step)
    checkpoints = Checkpoints(root)
    if values:
        checkpoints.record_metrics(number, dict(map(_parse, values)))
        try_mirror(read_settings(), root, [])
    rows = [MetricRow(number, *each) for each in sorted(checkpoints.metrics(number).items())]
    print_rows("metrics", rows, output, empty=f"step {number} of {root} has no metrics")


def _parse(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise with_hint(ConfigError(f"{text!r} is not NAME=NUMBER"), "e.g. reward=0.8") from None
