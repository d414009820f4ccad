"""Commands that show steps: ls, show."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    Step,
    app,
    format_size,
    format_time,
    make_console,
    print_json,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.errors import FormatError

if TYPE_CHECKING:
    from trinity_sync.storage.manifest import Manifest

T = TypeVar("T")
MAX_ROWS = 100
"""Default number of steps in a table: a terminal takes a millisecond per row."""


@app.command(
    "ls",
    rich_help_panel="Look at a job",
    epilog="Examples:  [bold]trinity-sync ls ckpts[/]  ·  "
    "[bold]trinity-sync ls ckpts --json[/]  ·  [bold]trinity-sync ls s3://bucket/job[/]",
)
def list_steps(
    root: Annotated[str, typer.Argument(help="Root of the job, or the URL of its remote.")],
    as_json: AsJson = False,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of highest steps to list; {MAX_ROWS} by default, all with --json."
        ),
    ] = None,
) -> None:
    """List the steps of a job with their states, latest pointers and uses."""
    from trinity_sync.layout import steps_on_disk

    shown = last or (None if as_json else MAX_ROWS)
    if "://" in root:
        left_out, rows = _take_last(_summarize_remote(root), shown)
    else:
        left_out, steps = _take_last(steps_on_disk(require_existing(Path(root))), shown)
        rows = _summarize_steps(Path(root), steps)
    has_remote = any(row["stored"] is not None for row in rows)
    why = [row.pop("why") for row in rows]
    for sentence in filter(None, [*why, *_list_other_releases(root)]):
        typer.echo(sentence, err=True)
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"no steps in {root}")
        return
    columns = ("step", "run", "kinds", "files", "size", "committed", "latest of", "in use")
    table = Table(*columns, *["in remote"] * has_remote, "state")
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(
            str(row["step"]),
            str(row["run"] or ""),
            ", ".join(row["kinds"]),
            str(row["files"] or ""),
            format_size(row["bytes"]) if row["kinds"] else "",
            row["committed"].replace("T", " "),
            ", ".join(row["pointers"]),
            ", ".join(row["in_use"]),
            *[{True: "yes", False: "no", None: ""}[row["stored"]]] * has_remote,
            row["state"],
        )
    make_console().print(table)
    if left_out:
        typer.echo(f"{left_out:,} lower steps are not shown; see --last")


@app.command(
    rich_help_panel="Look at a job",
    epilog="Examples:  [bold]trinity-sync show ckpts 40[/]  ·  "
    "[bold]trinity-sync show ckpts 40 --json[/]",
)
def show(
    root: Root,
    step: Step,
    as_json: AsJson = False,
) -> None:
    """Show a committed step: its files with sizes and digests, and its save functions."""
    from trinity_sync.layout import step_folder
    from trinity_sync.storage.corruption import read_corruption
    from trinity_sync.storage.discovery import read_step_state
    from trinity_sync.storage.pins import list_tags

    number = resolve_step_argument(root, step)
    found = read_step_state(root, number)
    manifest = found.manifest or found.require_loadable()
    folder = step_folder(root, number)
    sizes = {record.path: _size_on_disk(folder / record.path) for record in manifest.files}
    corruption = read_corruption(root, number)
    bad = corruption.files if corruption else {}
    tagged = [tag.name for tag in list_tags(root).values() if tag.step == number]
    if as_json:
        more = {"bytes": manifest.nbytes, "state": found.state, "corrupted": bad, "tags": tagged}
        print_json({**asdict(manifest), **more})
        return
    console, committed = make_console(), format_time(manifest.committed_at).replace("T", " ")
    console.print(
        f"step {number} of run {manifest.run}, {found.state}: {', '.join(manifest.kinds)}, "
        f"committed {committed}, {manifest.nbytes:,} bytes"
        + "".join(f", tagged {name}" for name in tagged),
        highlight=False,
    )
    for timing in manifest.timings:
        console.print(f"{timing.kind}: {timing}", highlight=False)
    table = Table("file", "bytes", "digest", "state")
    table.columns[1].justify = "right"
    for record in manifest.files:
        nbytes = sizes[record.path]
        state = "valid" if nbytes == record.nbytes else "missing" if nbytes is None else "truncated"
        state = "corrupted" if record.path in bad else state
        table.add_row(record.path, f"{record.nbytes:,}", record.digest, state)
    console.print(table)
    if corruption:
        console.print(f"corrupted: {corruption}", highlight=False)
    if manifest.callables:
        callables = Table("callable save", "rank", "seconds", "files")
        for each in manifest.callables:
            files = "\n".join(each.files)
            callables.add_row(each.name, str(each.rank), f"{each.seconds:.2f}", files)
        console.print(callables)


def _take_last(steps: list[T], count: int | None) -> tuple[int, list[T]]:
    """Return the number of steps left out, and the last ``count`` steps."""
    left_out = max(len(steps) - count, 0) if count else 0
    return left_out, steps[left_out:]


def _summarize_steps(root: Path, steps: list[int]) -> list[dict[str, Any]]:
    from trinity_sync.layout import KINDS
    from trinity_sync.storage.discovery import list_known_runs, read_step_state
    from trinity_sync.storage.latest_pointer import read_latest_pointer
    from trinity_sync.storage.pins import list_steps_in_use, list_tags
    from trinity_sync.storage.required_remote import is_replicated, read_required_remote

    try:
        has_remote = bool(read_required_remote(root))
    except FormatError:  # reported by the command
        has_remote = False
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    in_use, tagged, runs = list_steps_in_use(root), list_tags(root).values(), list_known_runs(root)
    rows = []
    for step in steps:
        found = read_step_state(root, step, runs)
        manifest, why = found.manifest, found.reason if found.state == "another format" else ""
        pointed = [kind for kind, target in pointers.items() if target == step]
        row = {
            "step": step,
            **_summarize_manifest(manifest),
            "pointers": pointed,
            "in_use": in_use[step],
        }
        names = [tag.name for tag in tagged if tag.step == step]
        stored = None
        try:
            stored = is_replicated(root, manifest) if has_remote and manifest else None
        except FormatError as error:
            why = str(error)
        rows.append({**row, "tags": names, "stored": stored, "state": found.state, "why": why})
    return rows


def _list_other_releases(root: str) -> list[str]:
    """Return an error text for each record of another release in a root, except steps."""
    from trinity_sync.storage.discovery import list_unreadable_records

    return [] if "://" in root else [str(error) for error in list_unreadable_records(root)]


def _summarize_remote(url: str) -> list[dict[str, Any]]:
    from trinity_sync.remote.remote_root import Remote

    unknown: dict[str, Any] = {"pointers": [], "in_use": [], "tags": [], "stored": None}
    return [
        {
            **{
                "step": step.step,
                **_summarize_manifest(step.manifest),
                **unknown,
                "state": step.state,
            },
            "why": str(step.unreadable or ""),
        }
        for step in Remote(url).list_steps()
    ]


def _summarize_manifest(manifest: "Manifest | None") -> dict[str, Any]:
    if manifest is None:
        return {"run": None, "kinds": [], "files": 0, "bytes": 0, "committed": ""}
    return {
        "run": manifest.run,
        "kinds": list(manifest.kinds),
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
        "committed": format_time(manifest.committed_at),
    }


def _size_on_disk(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
