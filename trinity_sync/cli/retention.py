"""Commands that keep and remove steps: prune, pin, unpin, tag, untag, metrics, rewind."""

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
    with_hint,
)
from trinity_sync.cli.completion import complete_step, complete_tag
from trinity_sync.cli.output import Output, is_text, print_object, print_rows, print_table, utc
from trinity_sync.cli.schema import (
    MetricRow,
    PinRow,
    PrunedStep,
    PruneReport,
    RewindReport,
    TagRow,
    Unpinned,
)
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.orchestration.quantities import format_bytes

if TYPE_CHECKING:
    from trinity_sync.retention.planner import RemovalPlan


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
    from trinity_sync.retention.prune import plan_prune
    from trinity_sync.retention.prune import prune as prune_root
    from trinity_sync.settings import StackSettings
    from trinity_sync.storage.job_settings import read_job_settings

    settings, job = read_settings(), read_job_settings(require_existing(root))
    rules = Rules.of_job(job, keep=keep, keep_weights=keep_weights, keep_quarantine=keep_quarantine)
    plan = plan_prune(root, rules, time.time())
    if not dry_run:
        if not yes and (plan.removed or plan.quarantine):
            if is_text(output):
                _print_pruned(_describe(plan, dry_run=True), str(root), output)
            confirm(f"remove {_count(plan)} of {root}, {format_bytes(plan.nbytes)}", yes=yes)
        reuse_files = StackSettings().io.reuse_files
        plan = prune_root(root, plan, spool=settings.spool, recycle=reuse_files)
        try_mirror(settings, root, [each.step for each in plan.removed])
    report = _describe(plan, dry_run=dry_run)
    print_object("prune", report, output, lambda: _print_pruned(report, str(root), output))


def _count(plan: "RemovalPlan") -> str:
    steps = f"{len(plan.removed)} steps"
    return steps + f" and {len(plan.quarantine)} folders in quarantine" * bool(plan.quarantine)


def _describe(plan: "RemovalPlan", *, dry_run: bool) -> PruneReport:
    rows = list_pruned(plan, dry_run=dry_run)
    return PruneReport(dry_run, plan.nbytes, rows, list(plan.quarantine))


def list_pruned(plan: "RemovalPlan", *, dry_run: bool = False) -> list[PrunedStep]:
    """Return what became of the steps of a plan, newest first, as rows."""
    removed = "would be removed" if dry_run else "removed"
    return [
        PrunedStep(step.step, step.nbytes, "kept" if why else removed, why or None)
        for step, why in reversed(plan.steps)
    ]


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


@app.command(
    "rewind ckpts 40", "rewind ckpts latest~1 --dry-run", "rewind ckpts best --yes",
    panel="Keep and remove steps",
    note="Nothing is changed, with exit code 1, if a newer step is leased, pinned or tagged, "
        "or the answer is no. To undo it: mv ROOT/.trinity_sync/quarantine/TIME/* ROOT/, and then "
        "trinity-sync rewind ROOT STEP to the newest of them.",
)  # fmt: skip
def rewind(
    root: Root,
    step: Step,
    force: Annotated[
        bool, typer.Option("--force", help="Quarantine pinned and tagged steps as well.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be quarantined, and change nothing.")
    ] = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Make an earlier step the newest; newer steps are quarantined, not deleted."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.storage.quarantine import list_newer_steps
    from trinity_sync.storage.quarantine import rewind as rewind_to

    number = resolve_step_argument(root, step)
    newer = list_newer_steps(root, number)
    what = f"quarantine {len(newer)} newer steps ({_join(newer)})" if newer else "no newer step"
    if dry_run:
        report = RewindReport(number, True, None, newer, None)
        print_object("rewind", report, output, f"would rewind {root} to step {number}: {what}")
        return
    confirm(f"rewind {root} to step {number}: {what}", yes=yes)
    done = rewind_to(root, number, force=force)
    try_mirror(read_settings(), root, done.quarantined)
    folder = str(done.folder) if done.folder else None
    report = RewindReport(number, False, done.run, list(done.quarantined), folder)
    text = f"{root} is at step {number}; the next run resumes from there"
    if folder:
        text += f"\nin quarantine: steps {_join(list(done.quarantined))}, in {folder}"
    print_object("rewind", report, output, text)


def _join(steps: list[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
