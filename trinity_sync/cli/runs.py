"""Commands for saves, in flight and ended: runs, retry, wait."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.console import Console

from trinity_sync.cli.app import (
    Root,
    Step,
    app,
    read_settings,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.completion import complete_step
from trinity_sync.cli.output import Output, print_document, print_object, print_rows
from trinity_sync.errors import (
    CommitError,
    PrefectApiError,
    SaveError,
    SaveFailedError,
    SaveTimeoutError,
)
from trinity_sync.orchestration.report.facts import SaveRow

if TYPE_CHECKING:
    from trinity_sync.client.prefect_api import FlowRun
    from trinity_sync.layout import Kind

MAX_ROWS = 20
"""Default number of saves in a table; the other formats have all that the server returned."""
LOOK_S = 0.25
"""Seconds between two looks at the root while waiting; an attribute of a folder is read."""
ASK_S = 2.0
"""Seconds between two questions to the server while waiting."""
QUICK_S = 2.0
"""Seconds that a command waits for a server that it could do without."""


@app.command(
    "runs ckpts", "runs ckpts --failed", "runs ckpts -o json", panel="Look at a job",
    note="Without a stack, the saves that the job's files and this node's shared memory tell; the "
        "same, with exit code 4, if its Prefect server does not answer.",
)  # fmt: skip
def runs(
    root: Root,
    failed: Annotated[bool, typer.Option("--failed", help="Show failed saves only.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Show at most N saves; {MAX_ROWS} in a table.", metavar="N"),
    ] = None,
    output: Output = "table",
) -> None:
    """List the saves of a job: in flight, failed with the reason, superseded and committed."""
    rows, unanswered = read_saves(require_existing(root))
    if failed:
        rows = [row for row in rows if row.status == "failed"]
    most = limit or (MAX_ROWS if output == "table" else len(rows))
    what = "failed save" if failed else "save"
    columns = "step run kind status since seconds reason"
    print_rows("saves", rows[:most], output, columns, empty=f"no {what} of {root} is known")
    if (retry := next((row.retry for row in rows if row.retry), None)) and output == "table":
        typer.echo(f"hint: cause removed: {retry}", err=True)
    if len(rows) > most and output == "table":
        typer.echo(f"{len(rows) - most:,} older saves not shown; use --limit", err=True)
    if unanswered:
        raise unanswered


@app.command(
    "retry ckpts 40",
    "trinity-sync runs ckpts --failed | cut -f1 | xargs -n1 trinity-sync retry ckpts",
    panel="Look after steps",
    note="The images of a failed save stay in shared memory until later saves need the slots. "
        "Remove the cause first; trinity-sync runs shows it.",
)  # fmt: skip
def retry(root: Root, step: Step, output: Output = "table") -> None:
    """Run a failed save again: its flow run, as Retry in the Prefect UI does, or by the saver."""
    from trinity_sync.client.prefect_api import ask_server
    from trinity_sync.client.prefect_connection import find_server
    from trinity_sync.client.saver_control import SaveTrigger, list_savers
    from trinity_sync.pipeline.pending import retry_images
    from trinity_sync.snapshot.spool import open_job_spool

    number, settings = resolve_step_argument(root, step), read_settings()
    rows, unanswered = read_saves(root, step=number)
    by_status = {row.status: row for row in reversed(rows)}
    save = by_status.get("failed")
    if save is None and not list_savers(settings.spool):  # what waits for one
        save = next((row for row in rows if row.is_in_flight and not row.flow_run), None)
    if unanswered and (save is None or save.flow_run):
        raise unanswered
    if save is None:
        raise with_hint(
            SaveError(
                f"no save of step {number} in {root} has failed: it is "
                + next(iter(by_status), "unknown")
            ),
            f"trinity-sync runs {root} lists the saves that are known",
        )
    where = f"trinity-sync wait {root} {number}"
    if save.flow_run and save.attempts is not None:  # otherwise the server has it no longer
        run = UUID(save.flow_run)
        ask_server(settings, lambda api: api.retry_flow_run(run))
        where = save.url or where
    else:
        if settings.saver == "stack":
            find_server(settings.home)  # otherwise nothing would save it
        spool = open_job_spool(settings.spool, root)
        retry_images(spool, *save.save)
        SaveTrigger(settings).ensure_saver(spool.folder.name)
    save = replace(save, status="pending", retry=None)
    print_object("save", save, output, f"the save of step {number} runs again: {where}")


@app.command(
    "wait ckpts 40", "wait ckpts --timeout 60", panel="Look at a job",
    note="Exit code 1 if a save failed or was superseded, or at the time-out.",
)  # fmt: skip
def wait(
    root: Root,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP",
            autocompletion=complete_step,
            help="Step to wait for; by default all that are being saved.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Time-out in seconds.")] = 600.0,
    output: Output = "table",
) -> None:
    """Wait until a step is committed, or all saves in flight are."""
    from trinity_sync.client.prefect_connection import ANSWER_S
    from trinity_sync.orchestration.report.steps import read_step

    base, deadline = require_existing(root), time.monotonic() + timeout
    saves: dict[int, set[tuple[int, Kind]]] = {}
    if step is None:
        rows, unanswered = read_saves(base, answer_s=max(QUICK_S, min(timeout, ANSWER_S)))
        if unanswered:
            raise unanswered
        for save in rows:
            if save.is_in_flight:
                saves.setdefault(save.step, set()).add((save.run, save.kind))
    else:
        saves[resolve_step_argument(base, step)] = set()
    for number in sorted(saves):
        with Console(stderr=True).status(f"waiting for the commit of step {number}"):
            _await_step(base, number, saves[number], deadline, timeout)
    if output == "json":
        print_document("steps", [read_step(base, number) for number in sorted(saves)])
        return
    for number in sorted(saves):
        typer.echo(f"step {number} is committed")
    if not saves:
        typer.echo(f"no save of {root} is in flight", err=True)


def read_saves(
    root: Path, *, step: int | None = None, answer_s: float | None = None
) -> tuple[list[SaveRow], PrefectApiError | None]:
    """Return the saves of a job, or of one of its steps, the newest first.

    Also why its server does not answer as it should, if a stack is used.
    """
    from trinity_sync.client.prefect_api import ask_server
    from trinity_sync.client.prefect_connection import knows_server
    from trinity_sync.orchestration.report.steps import list_saves
    from trinity_sync.snapshot.identity import job_id

    settings, unanswered = read_settings(), None
    runs: list[FlowRun] = []
    try:
        if knows_server(settings):
            runs = ask_server(
                settings, lambda api: api.read_saves(job_id(root), step=step), answer_s=answer_s
            )
    except PrefectApiError as error:
        unanswered = error
    return list_saves(settings, root, step=step, runs=runs), unanswered


def _await_step(
    root: Path, step: int, saves: "set[tuple[int, Kind]]", deadline: float, timeout_s: float
) -> None:
    """Wait until a step is committed and not superseded.

    A superseded step is waited for while a run lives that may save it again. ``saves`` are run and
    kind of what must be in the step; empty for any. ``deadline`` is by `time.monotonic`, and
    ``timeout_s`` for the error.

    Raises:
        SaveFailedError: Its save failed, or was superseded.
        SaveTimeoutError: It is not committed in time.
        CommitError: The step is corrupted, or was committed and removed.
    """
    from trinity_sync.fs.atomic import revalidate_folder
    from trinity_sync.orchestration.recovery.node import CRASH_GRACE_S
    from trinity_sync.orchestration.report.collect import is_running
    from trinity_sync.storage.discovery import read_step_state

    asked, crashed_since = -ASK_S, None
    while True:
        revalidate_folder(root)  # another node may commit it
        found = read_step_state(root, step)
        manifest = found.manifest
        if manifest and all(manifest.has_kind(kind, run=run) for run, kind in saves):
            if found.state == "valid":
                return
            if found.state == "superseded" and saves and found.error:
                raise found.error
        if found.state == "corrupted":
            raise found.error or CommitError(f"step {step} in {root} is corrupted")
        now = time.monotonic()
        if now >= deadline:
            why = found.reason if found.state == "superseded" else ""
            raise with_hint(
                SaveTimeoutError(
                    f"step {step} in {root} is not committed after {timeout_s:g} s"
                    + f": {why}" * bool(why)
                ),
                f"trinity-sync runs {root} shows its save",
            )
        if now - asked >= ASK_S:
            answer_s = min(QUICK_S, deadline - now)
            save, asked = _read_decisive_save(root, step, saves, answer_s), now
            crashed = save is not None and save.cause == "Crashed"
            crashed_since = (crashed_since or now) if crashed else None
            if save and (crashed_since is None or now - crashed_since > CRASH_GRACE_S):
                _require_not_failed(root, save)
            if save and manifest is None:
                _require_not_removed(root, save)
            saved_later = save and manifest and save.run > manifest.run
            if found.error and manifest and not saved_later and is_running(root) is False:
                raise found.error  # nothing saves the superseded step again
        time.sleep(max(min(LOOK_S, deadline - time.monotonic()), 0.0))


def _read_decisive_save(
    root: Path, step: int, wanted: "set[tuple[int, Kind]]", answer_s: float
) -> SaveRow | None:
    """Return the save of a step by the latest run, or one of those wanted that has failed.

    None if none is known.
    """
    saves, _ = read_saves(root, step=step, answer_s=answer_s)
    if wanted:
        saves = [each for each in saves if (each.run, each.kind) in wanted]
    return max(
        saves,
        key=lambda each: (
            bool(wanted) and each.has_failed,
            each.run,
            each.is_in_flight,
            each.since or 0.0,
        ),
        default=None,
    )


def _is_saved_later(root: Path, save: SaveRow) -> bool:
    """Return whether a later run lives, or is to follow a rewind, which may save the step again."""
    from trinity_sync.storage.rewind import REWIND
    from trinity_sync.storage.runs import find_living_run, find_newest_run

    newest = find_newest_run(root)
    if newest and newest.key.startswith(REWIND) and newest.resumed_from < save.step:
        return True
    living = find_living_run(root, "")
    return living is not None and living[0].number > save.run


def _require_not_removed(root: Path, save: SaveRow) -> None:
    from trinity_sync.storage.save_timing import read_removals

    if save.status != "committed":  # which each look asks; the log may be long
        return
    removed = (save.run, save.step) in {(each.run, each.step) for each in read_removals(root)}
    if removed and not _is_saved_later(root, save):
        raise CommitError(
            f"step {save.step} of run {save.run} in {root} was committed and has been removed since"
        )


def _require_not_failed(root: Path, save: SaveRow) -> None:
    if not save.has_failed:
        return
    error = SaveFailedError(
        f"the save of step {save.step} in {root} "
        f"{'was ' * (save.status == 'superseded')}{save.status}: {save.reason or save.cause}"
        + f" ({save.url})"
        * bool(save.url)
    )
    raise with_hint(error, save.retry or "")
