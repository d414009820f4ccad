"""Commands that look after steps once they are committed: verify, reconcile, export."""

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from trinity_sync.cli.frame import (
    AsJson,
    Root,
    app,
    existing,
    output,
    print_json,
    size,
)
from trinity_sync.errors import ConfigError

DAY_S = 86_400


@app.command(
    epilog="Exit code 0 if all that was read is whole, else 1.\n\n"
    "Examples:  [bold]trinity-sync verify ckpts[/]  ·  [bold]trinity-sync verify ckpts --step 40[/]"
    "  ·  [bold]trinity-sync verify ckpts --sample 50GB[/]"
)
def verify(
    root: Root,
    step: Annotated[int | None, typer.Option(min=0, help="Read this step.")] = None,
    newest: Annotated[
        int | None, typer.Option(min=1, help="Read so many newest steps; 1 if nothing is asked.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Read about so much of all steps, such as 50GB; other files each day."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Which part a sample is; the number of the day if unset."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read files again and compare their digests; damaged steps are marked and loaded no more."""
    from trinity_sync.storage.verify import check, choose, judge

    if step is None and not sample:
        newest = newest or 1
    files = choose(
        existing(root),
        step=step,
        newest=newest or 0,
        sample_bytes=bytes_of(sample) if sample else 0,
        seed=int(time.time()) // DAY_S if seed is None else seed,
    )
    verdicts = judge(check(files))
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        typer.echo(f"nothing is committed in {root}")
    else:
        table = Table("step", "files", "size", "GB/s", "state")
        for column in range(4):
            table.columns[column].justify = "right"
        for verdict in verdicts:
            speed = f"{verdict.nbytes / verdict.seconds / 1e9:.2f}" if verdict.seconds else ""
            state = f"{verdict.state}: {verdict.wrong}" if verdict.wrong else verdict.state
            row = (str(verdict.step), str(verdict.files), size(verdict.nbytes), speed, state)
            table.add_row(*row)
        output().print(table)
    raise typer.Exit(1 if any(verdict.state == "damaged" for verdict in verdicts) else 0)


def bytes_of(text: str) -> int:
    """A number of bytes as people write it: ``5GB``, ``500 MB``, ``2GiB``, ``1000``.

    Raises:
        ConfigError: it is none.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[f"{letter}b"] = units[letter] = 1000**power
        units[f"{letter}ib"] = 1024**power
    number = text.strip().lower().rstrip("bgikmt ")
    unit = text.strip().lower().removeprefix(number).strip()
    try:
        nbytes = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"{text!r} is no size; write it like 500MB, 5GB or 2GiB")
    return nbytes
