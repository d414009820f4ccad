"""Commands that keep and remove steps: prune, rm, pin, unpin, metrics, rewind."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import (
    Root,
    Step,
    Yes,
    app,
    confirm,
    is_root,
    read_settings,
    require_existing,
    resolve_step_argument,
    update_catalog,
    with_hint,
)
from trinity_sync.cli.completion import complete_step
from trinity_sync.cli.output import Output, print_object, print_rows, print_table
from trinity_sync.cli.rows import MetricRow, PrunedStep, PruneReport, Unpinned
from trinity_sync.errors import ConfigError, StepInUseError
from trinity_sync.layout import parse_number
from trinity_sync.orchestration.quantities import format_bytes

if TYPE_CHECKING:
    from trinity_sync.retention.removal import RemovalPlan


@app.command(
    "prune ckpts --keep last=3 --dry-run", "prune weights --keep last=100",
    "prune ckpts --keep last=3,every=100,best=2:reward:max --yes", panel="Keep and remove steps",
    note="A policy is all, or words that each keep steps, joined by commas: last=N the newest "
        "N, every=N those whose number is a multiple of N, hourly=N, daily=N and weekly=N the "
        "first of each of the last N hours, days and weeks, newer=2d those of "
        "the last 2 days (s, m, h, d), best=N:METRIC:max (or min) the N best. Of a folder of "
        "published weights, whole chains are removed that neither --keep nor a reader keeps.\n\n"
        "Exit code 0 also if there was nothing to remove.",
)  # fmt: skip
def prune(
    root: Root,
    keep: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Checkpoints to keep (default: the job's setting)."),
    ] = "",
    keep_model: Annotated[
        str, typer.Option(metavar="POLICY", help="Other checkpoints whose weights to keep.")
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
    from trinity_sync.retention.prune import plan_prune
    from trinity_sync.retention.prune import prune as prune_root
    from trinity_sync.retention.removal import Rules
    from trinity_sync.settings import StackSettings
    from trinity_sync.storage.job_settings import read_job_settings

    settings, given = read_settings(), {"keep": keep, "keep_model": keep_model}
    others = {"keep_weights": keep_weights, "keep_quarantine": keep_quarantine}
    is_folder = (root / "latest.json").is_file() and not is_root(root)  # of a WeightFolder
    if is_folder and not any((keep_model, *others.values())):
        from trinity_sync.weights.folder.published import plan_chains, remove_chains

        plan = plan_chains(root, keep or "all")
    else:
        job = read_job_settings(require_existing(root))
        plan = plan_prune(root, Rules.of_job(job, **given, **others))
    if not dry_run:
        if not yes and (plan.changed or plan.quarantine):
            if output == "table":
                _print_pruned(_describe(plan, dry_run=True), str(root))
            confirm(f"remove {_count(plan)} of {root}, {format_bytes(plan.nbytes)}", yes=yes)
        if is_folder:
            plan = remove_chains(root, plan)
        else:
            reuse_files = StackSettings().io.reuse_files
            plan = prune_root(root, plan, spool=settings.spool, recycle=reuse_files)
            update_catalog(root, plan.changed)
    report = _describe(plan, dry_run=dry_run)
    print_object("prune", report, output, lambda: _print_pruned(report, str(root)))


@app.command(
    "rm ckpts 40", "rm ckpts 40 60 --yes", panel="Keep and remove steps",
    note="The newest step, the newest healthy one, and what is pinned, tagged, leased, being saved "
        "or lacking in the required remote are refused, and then none is removed. Copies in a "
        "remote stay.",
)  # fmt: skip
def rm(
    root: Root,
    steps: Annotated[
        list[str],
        typer.Argument(
            metavar="STEP...", autocompletion=complete_step, help="Steps, as in the other commands."
        ),
    ],
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Remove steps whatever the policies say, unless something else keeps them."""
    from trinity_sync.retention.policies import ALL
    from trinity_sync.retention.prune import plan_prune
    from trinity_sync.retention.prune import prune as prune_root
    from trinity_sync.retention.removal import Rules
    from trinity_sync.settings import StackSettings

    named = frozenset(resolve_step_argument(root, step) for step in steps)
    plan = plan_prune(root, Rules(ALL, ALL, named=named))
    _refuse(root, named, plan)
    confirm(f"remove {_count(plan)} of {root}, {format_bytes(plan.nbytes)}", yes=yes)
    spool, reuse_files = read_settings().spool, StackSettings().io.reuse_files
    plan = prune_root(root, plan, spool=spool, recycle=reuse_files)
    update_catalog(root, plan.changed)
    report = _describe(plan, dry_run=False, steps=named)
    print_object("prune", report, output, lambda: _print_pruned(report, str(root)))
    _refuse(root, named, plan)


def _refuse(root: Path, named: Set[int], plan: "RemovalPlan") -> None:
    """Raise for steps of a plan that were to be removed and are kept, or not committed."""
    kept = {each.step: why for each, why in (*plan.kept, *plan.spared)}
    gone = f"it is not committed (trinity-sync reconcile {root} frees what a killed removal left)"
    for step in sorted(named - {*plan.changed}):
        raise StepInUseError(
            f"step {step} in {root} is not removed: {kept.get(step, gone)}. "
            f"trinity-sync ls {root} lists pins and readers; a later save makes a step removable"
        )


def _count(plan: "RemovalPlan") -> str:
    steps = f"{len(plan.removed)} steps"
    steps += f" and all but the weights of {len(plan.reduced)}" * bool(plan.reduced)
    return steps + f" and {len(plan.quarantine)} folders in quarantine" * bool(plan.quarantine)


def _describe(plan: "RemovalPlan", *, dry_run: bool, steps: Set[int] = frozenset()) -> PruneReport:
    """Return what became of the steps of a plan, by default of all, the newest first."""
    rows = [
        PrunedStep(step.step, step.nbytes, status, why)
        for step, status, why in reversed(plan.describe(dry_run=dry_run))
        if not steps or step.step in steps
    ]
    return PruneReport(dry_run, plan.nbytes, rows, list(plan.quarantine))


def _print_pruned(report: PruneReport, root: str) -> None:
    if report.steps:
        print_table(report.steps, "step bytes status reason")
    else:
        typer.echo(f"nothing is committed in {root}", err=True)
    would = "would be " if report.dry_run else ""
    for name in report.quarantine:
        typer.echo(f"quarantine {name}: {would}removed", err=True)
    typer.echo(f"{format_bytes(report.bytes)} {would}freed in {root}", err=True)


@app.command(
    "pin ckpts 40 --reason 'the paper'", "pin ckpts latest --name best",
    "pin ckpts 60 --name best --force", panel="Keep and remove steps",
    note="The name is a tag: commands take it in the place of the step's number. ls shows pins and "
        "tags.",
)  # fmt: skip
def pin(
    root: Root,
    step: Step,
    name: Annotated[
        str,
        typer.Option(metavar="TAG", help="Name: letters, digits, _ and -, e.g. best or paper-v1."),
    ] = "",
    reason: Annotated[str, typer.Option(help="Reason, shown in ls and report.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Move the name from another step.")
    ] = False,
    output: Output = "table",
) -> None:
    """Pin a committed step, perhaps under a name: no policy removes it."""
    from trinity_sync.storage import steps_in_use

    number = resolve_step_argument(root, step)
    if name:
        made = steps_in_use.tag(root, number, name, reason, force=force)
    else:
        made = steps_in_use.pin(root, number, reason)
    print_object("pin", made, output, f"pinned step {made.step}" + f" as {name}" * bool(name))


@app.command("unpin ckpts 40", "unpin ckpts best", panel="Keep and remove steps")
def unpin(
    root: Root,
    pin: Annotated[
        str,
        typer.Argument(
            metavar="PIN",
            autocompletion=complete_step,
            help="Step, for its pin without a name; or the name of a pin.",
        ),
    ],
    output: Output = "table",
) -> None:
    """Remove a pin; unless another one keeps the step, policies may remove it again."""
    from trinity_sync.storage import steps_in_use

    named = steps_in_use.list_tags(require_existing(root), skip_torn=True)
    step = parse_number(pin)
    removed = step is None and steps_in_use.unpin(root, pin)  # also one whose file is torn
    if not removed:
        step = resolve_step_argument(root, pin)
        removed = steps_in_use.unpin(root, step)
    elif pin in named:
        step = named.pop(pin).step
    kept = [name for name, each in named.items() if each.step == step]
    what = pin if step is None else f"step {step}"
    text = f"unpinned {what}" if removed else f"{what} was not pinned"
    if kept:
        text += f"\nstep {step} is still pinned as {', '.join(kept)}"
    print_object("pin", Unpinned(step, removed, kept), output, text)


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
    from trinity_sync.client.checkpoints import Checkpoints

    number = resolve_step_argument(root, step)
    checkpoints = Checkpoints(root)
    if values:
        checkpoints.record_metrics(number, dict(map(_parse, values)))
        update_catalog(root, [number])
    rows = [MetricRow(number, *each) for each in sorted(checkpoints.metrics(number).items())]
    print_rows(
        "metrics", rows, output, "name value", empty=f"step {number} of {root} has no metrics"
    )


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
    from trinity_sync.storage.rewind import RewindResult, list_newer_steps
    from trinity_sync.storage.rewind import rewind as rewind_to

    number = resolve_step_argument(root, step)
    newer = list_newer_steps(root, number)
    what = f"quarantine {len(newer)} newer steps ({_join(newer)})" if newer else "no newer step"
    if dry_run:
        planned = RewindResult(number, None, tuple(newer), None)
        print_object("rewind", planned, output, f"would rewind {root} to step {number}: {what}")
        return
    confirm(f"rewind {root} to step {number}: {what}", yes=yes)
    done = rewind_to(root, number, force=force)
    update_catalog(root, done.quarantined)
    text = f"{root} is at step {number}; the next run resumes from there"
    if done.folder:
        text += f"\nin quarantine: steps {_join(done.quarantined)}, in {done.folder}"
    print_object("rewind", done, output, text)


def _join(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
