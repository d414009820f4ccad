"""Commands that show steps: ls, show."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from trinity_sync.cli.app import Root, RootOrUrl, Step, app, require_existing, resolve_step_argument
from trinity_sync.cli.output import (
    Output,
    format_time,
    paint,
    print_object,
    print_rows,
    print_table,
)
from trinity_sync.cli.rows import FileRow, StepDetails
from trinity_sync.orchestration.quantities import format_bytes
from trinity_sync.orchestration.report.facts import SaveRow, StepRow

T = TypeVar("T")
MAX_ROWS = 20
"""Default number of steps in a table; the other formats have all."""


@app.command(
    "ls ckpts", "ls ckpts -o json", "ls ckpts | cut -f1 | head -1",
    "ls s3://bucket/job", name="ls", panel="Look at a job",
    note="With a stack, saves of other nodes that are not committed yet are shown if its Prefect "
        "server answers within 2 seconds.",
)  # fmt: skip
def list_steps(
    root: RootOrUrl,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Show at most N steps; {MAX_ROWS} in a table, otherwise all.", metavar="N"
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """List the steps of a job with their status, and the saves in flight."""
    from trinity_sync.layout import steps_on_disk

    most = limit or (MAX_ROWS if output == "table" else None)
    saves: dict[int, SaveRow] = {}
    if "://" in root:
        left_out, rows = _take_last(_list_remote(root), most)
    else:
        base = require_existing(Path(root))
        saves = _read_saves(base)
        found = sorted({*steps_on_disk(base), *saves})
        left_out, steps = _take_last(found, most)
        rows = _read_rows(base, steps, saves)
    columns = "step run kind bytes committed_at status notes"
    print_rows("steps", rows[::-1], output, columns, empty=f"no steps in {root}")
    if left_out and output == "table":
        typer.echo(f"{left_out:,} older steps not shown; use --limit", err=True)
    if retries := [saves[step].retry for step in sorted(saves) if saves[step].retry]:
        typer.echo(f"hint: to run a failed save again: {retries[-1]}", err=True)


@app.command("show ckpts 40", "show ckpts latest", "show ckpts best -o json", panel="Look at a job")
def show(root: Root, step: Step, output: Output = "table") -> None:
    """Show a committed step: its files with sizes and digests, and its save functions."""
    from trinity_sync.layout import step_folder
    from trinity_sync.orchestration.report.steps import read_step
    from trinity_sync.storage.discovery import read_corruption, read_step_state

    number = resolve_step_argument(root, step)
    found = read_step_state(root, number)
    manifest = found.manifest or found.require_loadable()
    folder = step_folder(root, number)
    corruption = read_corruption(root, number)
    bad = corruption.files if corruption else {}
    files = []
    for record in manifest.files:
        path = folder / record.path
        nbytes = path.stat().st_size if path.is_file() else None
        status = (
            "valid" if nbytes == record.nbytes else "missing" if nbytes is None else "truncated"
        )
        status = "corrupted" if record.path in bad else status
        files.append(FileRow(record.path, record.nbytes, status, record.digest))
    details = StepDetails(**{**vars(read_step(root, number)), "files": tuple(files)})
    print_object("step", details, output, lambda: _print_details(details))


def _print_details(details: StepDetails) -> None:
    from trinity_sync.storage.manifest import is_parent_there

    typer.echo(
        f"step {details.step} of run {details.run}: {paint(details.status)}, "
        f"{', '.join(details.kinds)}, committed {format_time(details.committed_at or 0.0)}, "
        f"{format_bytes(details.nbytes)}" + "".join(f", {each}" for each in details.in_use),
        color=True,
    )
    if details.reason:
        typer.echo(f"reason: {details.reason}")
    if details.removed:
        typer.echo(f"weights only: retention has removed {' and '.join(details.removed)}")
    if details.left_out:
        typer.echo(f"its run did not load {', '.join(details.left_out)} of the step it began at")
    for parent in details.parents:
        now = "" if is_parent_there(parent) else ", which is not there as it was"
        how = "merged from" if details.is_merge else "its run began from"
        typer.echo(f"{how} {parent}{now}")
    for timing in details.timings:
        typer.echo(f"{timing.kind}: {timing}")
    typer.echo("")
    if details.health:
        print_table(details.health, "role component tensors norm largest nonfinite unchanged_since")
        for alarm in details.alarms:
            typer.echo(f"{paint('warn')}: {alarm}", color=True)
        typer.echo("")
    print_table(details.files, "path bytes digest status")
    if details.save_functions:
        typer.echo("")
        print_table(details.save_functions, "name rank seconds files")


def _take_last(steps: list[T], count: int | None) -> tuple[int, list[T]]:
    """Return the number of steps left out, and the last ``count`` steps."""
    left_out = max(len(steps) - count, 0) if count else 0
    return left_out, steps[left_out:]


def _read_saves(root: Path) -> dict[int, SaveRow]:
    """Return the newest save of each step that is in flight or failed, as far as it is known."""
    from trinity_sync.cli.runs import QUICK_S, read_saves

    saves, _ = read_saves(root, answer_s=QUICK_S)
    ordered = sorted(saves, key=lambda each: (each.run, each.since or 0.0))
    newest = {save.step: save for save in ordered}
    return {n: save for n, save in newest.items() if save.is_in_flight or save.status == "failed"}


def _read_rows(root: Path, steps: list[int], saves: dict[int, SaveRow]) -> list[StepRow]:
    from trinity_sync.layout import step_folder
    from trinity_sync.orchestration.report.steps import read_steps
    from trinity_sync.storage.discovery import list_known_runs

    runs = list_known_runs(root)
    return [
        each
        for row in read_steps(root, steps, runs)
        # otherwise committed or removed between the two looks
        if row.step in saves or row.run is not None or step_folder(root, row.step).is_dir()
        for each in _add_save(row, saves.get(row.step))
    ]


def _add_save(row: StepRow, save: SaveRow | None) -> list[StepRow]:
    """Return the row of a step, if it is committed, and that of a newer save, if there is one."""
    from trinity_sync.layout import KINDS

    if save is None or save.run <= (row.run or 0):
        return [row]
    committed = row.status != "not committed"
    newer = replace(
        StepRow(row.step, "") if committed else row,
        status=save.status,
        reason=save.reason or "",
        run=save.run,
        kinds=tuple(kind for kind in KINDS if kind == save.kind),
        urls=(save.url,) if save.url else (),
    )
    return [row, newer] if committed else [newer]


def _list_remote(url: str) -> list[StepRow]:
    from trinity_sync.orchestration.report.steps import add_manifest
    from trinity_sync.remote.remote_root import Remote

    rows = []
    for found in Remote(url).list_steps():
        row = StepRow(found.step, found.state)
        rows.append(add_manifest(row, found.manifest) if found.manifest else row)
    return rows
