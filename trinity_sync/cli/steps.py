"""Commands that show and compare steps: ls, show, diff."""

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from trinity_sync.cli.app import (
    DONE,
    PROBLEM_FOUND,
    Role,
    RootOrUrlToRead,
    RootToRead,
    Step,
    app,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.completion import complete_step
from trinity_sync.cli.output import (
    Output,
    format_time,
    is_text,
    paint,
    print_object,
    print_rows,
    print_table,
    progress_bar,
    utc,
)
from trinity_sync.cli.schema import (
    FileRow,
    SaveFunctionRow,
    StallRow,
    StepDetails,
    StepRow,
    TensorRow,
    TimingRow,
)
from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.quantities import format_bytes

if TYPE_CHECKING:
    from trinity_sync.client.prefect_api import FlowRun
    from trinity_sync.storage.diff import TensorChange
    from trinity_sync.storage.manifest import Manifest

T = TypeVar("T")
MAX_ROWS = 20
"""Default number of steps in a table; the other formats have all."""
WATCH_S = 2.0
"""Seconds between two tables of ``--watch``."""


@app.command(
    "ls ckpts", "ls ckpts --watch", "ls ckpts -o json", "ls ckpts -o name | head -1",
    "ls s3://bucket/job", name="ls", panel="Look at a job",
    note="Saves that are not committed yet, or failed, are shown if the Prefect server answers "
        "within 2 seconds.",
)  # fmt: skip
def list_steps(
    root: RootOrUrlToRead,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Show at most N steps; {MAX_ROWS} in a table, otherwise all.", metavar="N"
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Show all steps.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Update the table until Ctrl-C.")
    ] = False,
    output: Output = "table",
) -> None:
    """List the steps of a job with their status, and the saves in flight."""
    if limit and show_all:
        raise with_hint(ConfigError("--limit and --all exclude each other"), "pass one of them")
    most = limit or (None if show_all or not is_text(output) else MAX_ROWS)
    if watch and not is_text(output):
        raise with_hint(ConfigError(f"--watch prints tables, not {output}"), "leave -o out")
    while watch:
        if sys.stdout.isatty():
            typer.echo("\x1b[2J\x1b[H", nl=False)  # clear the screen, cursor to its start
        _print_steps(root, most, output)
        time.sleep(WATCH_S)
    _print_steps(root, most, output)


def _print_steps(root: str, most: int | None, output: Output) -> None:
    from trinity_sync.layout import steps_on_disk

    if "://" in root:
        left_out, rows = _take_last(_summarize_remote(root), most)
    else:
        base = require_existing(Path(root))
        saves = _read_saves(base)
        found = sorted({*steps_on_disk(base), *saves})
        left_out, steps = _take_last(found, most)
        rows = _summarize_steps(base, steps, saves)
    for row in rows:
        if row.status == "another format":
            typer.echo(row.reason, err=True)
    print_rows("steps", rows[::-1], output, empty=f"no steps in {root}")
    if left_out and is_text(output):
        typer.echo(f"{left_out:,} older steps not shown; use --all", err=True)
    if failed := [row.step for row in rows if row.status == "failed"]:
        typer.echo(
            f"hint: to run a failed save again: trinity-sync retry {root} {failed[-1]}", err=True
        )


@app.command("show ckpts 40", "show ckpts latest", "show ckpts best -o json", panel="Look at a job")
def show(
    root: RootToRead,
    step: Step,
    output: Output = "table",
) -> None:
    """Show a committed step: its files with sizes and digests, and its save functions."""
    from trinity_sync.layout import step_folder
    from trinity_sync.storage.discovery import read_corruption, read_step_state
    from trinity_sync.storage.pins import list_steps_in_use, list_tags

    number = resolve_step_argument(root, step)
    found = read_step_state(root, number)
    manifest = found.manifest or found.require_loadable()
    folder = step_folder(root, number)
    corruption = read_corruption(root, number)
    bad = corruption.files if corruption else {}
    files = []
    for record in manifest.files:
        nbytes = _size_on_disk(folder / record.path)
        status = (
            "valid" if nbytes == record.nbytes else "missing" if nbytes is None else "truncated"
        )
        status = "corrupted" if record.path in bad else status
        files.append(FileRow(record.path, record.nbytes, status, record.digest))
    details = StepDetails(
        step=number,
        run=manifest.run,
        kinds=list(manifest.kinds),
        status=found.state,
        reason=found.reason or None,
        committed_at=utc(manifest.committed_at),
        bytes=manifest.nbytes,
        tags=[tag.name for tag in list_tags(root).values() if tag.step == number],
        in_use=list_steps_in_use(root)[number],
        timings=[
            TimingRow(
                kind=each.kind,
                roles=list(each.roles),
                stalls=[StallRow(one.role, one.rank, one.seconds) for one in each.stalls],
                submitted_at=utc(each.submitted_at),
                queue_s=each.queue_s,
                write_s=each.write_s,
                commit_s=each.commit_s,
                bytes=each.nbytes,
                ranks=each.ranks,
                nodes=each.nodes,
            )
            for each in manifest.timings
        ],
        files=files,
        save_functions=[
            SaveFunctionRow(each.name, each.rank, each.seconds, list(each.files))
            for each in manifest.callables
        ],
    )
    timings = [f"{each.kind}: {each}" for each in manifest.timings]
    print_object("step", details, output, lambda: _print_details(details, timings, output))


def _print_details(details: StepDetails, timings: list[str], output: Output) -> None:
    typer.echo(
        f"step {details.step} of run {details.run}: {paint(details.status)}, "
        f"{', '.join(details.kinds)}, committed {format_time(details.committed_at)}, "
        f"{format_bytes(details.bytes)}" + "".join(f", {each}" for each in details.in_use),
        color=True,
    )
    if details.reason:
        typer.echo(f"reason: {details.reason}")
    for timing in timings:
        typer.echo(timing)
    typer.echo("")
    print_table(FileRow, details.files, output)
    if details.save_functions:
        typer.echo("")
        print_table(SaveFunctionRow, details.save_functions, output)


def _take_last(steps: list[T], count: int | None) -> tuple[int, list[T]]:
    """Return the number of steps left out, and the last ``count`` steps."""
    left_out = max(len(steps) - count, 0) if count else 0
    return left_out, steps[left_out:]


def _read_saves(root: Path) -> dict[int, "FlowRun"]:
    """Return the newest save of each step that is in flight or failed, if a server answers."""
    from trinity_sync.cli.saves import describe_status, try_read_saves
    from trinity_sync.storage.discovery import list_known_runs

    saves = try_read_saves(root)
    if not saves:
        return {}
    runs = list_known_runs(root)
    newest: dict[int, FlowRun] = {}
    for save in sorted(saves, key=lambda each: (each.run, each.state.since)):
        newest[save.step] = save
    shown = ("pending", "writing", "failed")
    return {step: save for step, save in newest.items() if describe_status(save, runs) in shown}


def _summarize_steps(root: Path, steps: list[int], saves: dict[int, "FlowRun"]) -> list[StepRow]:
    from trinity_sync.cli.saves import describe_status
    from trinity_sync.layout import KINDS
    from trinity_sync.storage.discovery import list_known_runs, read_step_state
    from trinity_sync.storage.job_settings import is_replicated, read_required_remote
    from trinity_sync.storage.latest_pointer import read_latest_pointer
    from trinity_sync.storage.pins import list_steps_in_use, list_tags

    has_remote = bool(read_required_remote(root))
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    in_use, tagged, runs = list_steps_in_use(root), list_tags(root).values(), list_known_runs(root)
    rows = []
    for step in steps:
        found, save = read_step_state(root, step, runs), saves.get(step)
        manifest, status, reason, stored = found.manifest, str(found.state), found.reason, None
        if save and (manifest is None or save.run > manifest.run) and status != "another format":
            status, reason = describe_status(save, runs), save.state.message
            row: dict[str, Any] = {"run": save.run, "kind": save.kind, "url": save.page}
        elif save is None and manifest is None and not (root / f"global_step_{step}").is_dir():
            continue  # committed or removed between the two looks
        else:
            row = _summarize_manifest(manifest)
            stored = is_replicated(root, manifest) if has_remote and manifest else None
        latest_of = [str(kind) for kind, target in pointers.items() if target == step]
        remote = {True: ["in remote"], False: ["not in remote"], None: []}[stored]
        why = [] if status in ("valid", "not committed") else [_shorten(reason, step, root)]
        rows.append(
            StepRow(
                step=step,
                **row,
                status=status,
                notes=[*_describe_pointers(latest_of), *in_use[step], *remote, *filter(None, why)],
                latest_of=latest_of,
                tags=[tag.name for tag in tagged if tag.step == step],
                in_use=in_use[step],
                in_remote=stored,
                reason=reason or None,
            )
        )
    return rows


def _describe_pointers(latest_of: list[str]) -> list[str]:
    if "checkpoint" in latest_of:
        return ["latest"]
    return ["latest weights"] if latest_of else []


def _shorten(reason: str, step: int, root: Path) -> str:
    """Return a reason without what the row of the table says already."""
    for start in (f"step {step} in {root} is corrupted: ", f"{root}/global_step_{step}/"):
        reason = reason.replace(start, "")
    return reason.partition(". Choose another step")[0]


def _summarize_remote(url: str) -> list[StepRow]:
    from trinity_sync.remote.remote_root import Remote

    return [
        StepRow(
            step=step.step,
            **_summarize_manifest(step.manifest),
            status=step.state,
            reason=str(step.unreadable) if step.unreadable else None,
        )
        for step in Remote(url).list_steps()
    ]


def _summarize_manifest(manifest: "Manifest | None") -> dict[str, Any]:
    if manifest is None:
        return {}
    return {
        "run": manifest.run,
        "kind": "checkpoint" if "checkpoint" in manifest.kinds else "state_dict",
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
        "committed_at": utc(manifest.committed_at),
    }


def _size_on_disk(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


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
