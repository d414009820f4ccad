"""Commands for retention: prune, pin, unpin."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import (
    Root,
    Step,
    Yes,
    app,
    confirm,
    read_settings,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.cli.output import Output, is_text, print_object, print_table, utc
from trinity_sync.cli.schema import PinRow, PrunedStep, PruneReport, Unpinned
from trinity_sync.orchestration.quantities import format_bytes

if TYPE_CHECKING:
    from trinity_sync.retention.prune import Pruned


@app.command(
    "prune ckpts --keep last=3 --dry-run",
    "prune ckpts --keep last=3,every=100,best=2:reward:max --yes", panel="Keep and remove steps",
    note="A policy is all, or parts that each keep steps, joined by commas: last=N the newest "
        "N, every=N those whose number is a multiple of N, hourly=N, daily=N and weekly=N the "
        "newest of each of the last N hours, days and weeks, newer=2d those of "
        "the last 2 days (s, m, h, d), best=N:METRIC:max (or min) the N best.\n\n"
        "Exit code 0 also if there was nothing to remove.",
)  # fmt: skip
def prune(
    root: Root,
    keep: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Checkpoints to keep (default: the job's setting)."),
    ] = "",
    keep_weights: Annotated[
        str, typer.Option(metavar="POLICY", help="Steps to keep that hold weights only.")
    ] = "",
    keep_quarantine: Annotated[
        str, typer.Option(metavar="POLICY", help="Quarantined and superseded steps to keep.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Remove steps that no policy, pin, tag, lease or latest pointer keeps."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.retention.planner import Rules
    from trinity_sync.retention.prune import prune as prune_root
    from trinity_sync.settings import StackSettings
    from trinity_sync.storage.job_settings import read_job_settings

    settings, job = read_settings(), read_job_settings(require_existing(root))
    rules = Rules.of_job(job, keep=keep, keep_weights=keep_weights, keep_quarantine=keep_quarantine)
    reuse_files, now = StackSettings().io.reuse_files, time.time()

    def run(*, dry_run: bool, confirmed: "Pruned | None" = None) -> "Pruned":
        return prune_root(
            root,
            rules,
            now,
            spool=settings.spool,
            recycle=reuse_files,
            dry_run=dry_run,
            confirmed=confirmed,
            on_removed=lambda steps: try_mirror(settings, root, steps),
        )

    plan = None
    if not dry_run and not yes:
        plan = run(dry_run=True)
        if plan.removed or plan.quarantine:
            if is_text(output):
                _print_pruned(_describe(plan, dry_run=True), str(root), output)
            confirm(f"remove {_count(plan)} of {root}, {format_bytes(plan.nbytes)}", yes=yes)
    done = run(dry_run=dry_run, confirmed=plan)
    report = _describe(done, dry_run=dry_run)
    print_object("prune", report, output, lambda: _print_pruned(report, str(root), output))


def _count(plan: "Pruned") -> str:
    steps = f"{len(plan.removed)} steps"
    return steps + f" and {len(plan.quarantine)} folders in quarantine" * bool(plan.quarantine)


def _describe(done: "Pruned", *, dry_run: bool) -> PruneReport:
    rows = [
        PrunedStep(each.step.step, each.step.nbytes, each.state, each.why or None)
        for each in reversed(done.outcomes)
    ]
    return PruneReport(dry_run, done.nbytes, rows, list(done.quarantine))


def _print_pruned(report: PruneReport, root: str, output: Output) -> None:
    if report.steps:
        print_table(PrunedStep, report.steps, output)
    else:
        typer.echo(f"nothing is committed in {root}", err=True)
    would = "would be " if report.dry_run else ""
    for name in report.quarantine:
        typer.echo(f"quarantine {name}: {would}removed", err=True)
    typer.echo(f"{format_bytes(report.bytes)} {would}freed in {root}", err=True)


@app.command("pin ckpts 40 --reason 'the paper'", "pin ckpts latest", panel="Keep and remove steps")
def pin(
    root: Root,
    step: Step,
    reason: Annotated[str, typer.Option(help="Reason, shown in ls and report.")] = "",
    output: Output = "table",
) -> None:
    """Pin a committed step: no policy removes it."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    made = pins.pin(root, resolve_step_argument(root, step), reason)
    try_mirror(read_settings(), root, [])
    row = PinRow(made.step, None, made.reason or None, utc(made.pinned_at))
    print_object("pin", row, output, f"pinned step {made.step}")


@app.command("unpin ckpts 40", panel="Keep and remove steps")
def unpin(root: Root, step: Step, output: Output = "table") -> None:
    """Unpin a step: policies may remove it again."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage import pins

    number = resolve_step_argument(root, step)
    removed = pins.unpin(root, number)
    try_mirror(read_settings(), root, [])
    tags = pins.list_tags(root, skip_torn=True).values()
    kept = [tag.name for tag in tags if tag.step == number]
    text = f"unpinned step {number}" if removed else f"step {number} was not pinned"
    if kept:
        text += f"\nit is still kept by the tag {', '.join(kept)}; see trinity-sync untag"
    print_object("pin", Unpinned(number, removed, kept), output, text)
