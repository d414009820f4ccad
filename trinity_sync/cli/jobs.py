"""Commands for jobs: jobs ls, show, reindex, check, forget; readers; report."""

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_sync.cli.app import (
    DONE,
    PROBLEM_FOUND,
    App,
    Root,
    RootToRead,
    Yes,
    app,
    confirm,
    read_settings,
    require_existing,
    with_hint,
)
from trinity_sync.cli.completion import complete_root, complete_setting
from trinity_sync.cli.output import (
    Output,
    format_age,
    format_time,
    print_object,
    print_rows,
    print_table,
    progress_bar,
    utc,
)
from trinity_sync.cli.schema import (
    CatalogStep,
    CheckedJob,
    ForgottenJob,
    JobDetails,
    JobRow,
    JobSettingRow,
    ReaderRow,
    ReadersReport,
    ReindexedJob,
    WeightVersionRow,
)
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.orchestration.quantities import format_bytes

if TYPE_CHECKING:
    from trinity_sync.catalog.database import JobSteps

jobs = App(
    no_args_is_help=True,
    help="The jobs of this node, from the catalog: an SQL index of their files, which can be read "
    "from them again at any time.",
)
app.add_typer(jobs, name="jobs", rich_help_panel="Look at a job")

Roots = Annotated[
    list[Path], typer.Argument(autocompletion=complete_root, help="Roots of the jobs.")
]
Keep = Annotated[
    str,
    typer.Option(help="Show how much this policy for checkpoints would free, as in prune."),
]


@jobs.command("jobs ls", "jobs ls --keep last=3 -o wide", "jobs ls -o name", name="ls")
def list_jobs(keep: Keep = "", output: Output = "table") -> None:
    """List the jobs in the catalog, without reading their files."""
    from trinity_sync.catalog.database import get_catalog_url, list_jobs, open_catalog

    with open_catalog(get_catalog_url(read_settings())) as engine:
        found = list_jobs(engine)
    rows = [
        JobRow(
            root=job.root,
            job=job.job,
            steps=len(job.steps),
            newest=job.steps[-1].step if job.steps else None,
            weights=job.versions[-1].step if job.versions else None,
            bytes=job.nbytes,
            would_free=_count_freed(job, keep),
            updated_at=utc(job.mirrored_at),
        )
        for job in found
    ]
    print_rows("jobs", rows, output, empty="the catalog has no job")
    for job in found:
        if warning := _describe_outdated(Path(job.root), {each.step for each in job.steps}):
            typer.echo(warning, err=True)


@jobs.command("jobs show ckpts", "jobs show ckpts -o json", name="show")
def show_job(root: RootToRead, keep: Keep = "", output: Output = "table") -> None:
    """Show a job in the catalog: its steps and versions of the weights."""
    from trinity_sync.catalog.database import get_catalog_url, list_jobs_at, open_catalog

    with open_catalog(get_catalog_url(read_settings())) as engine:
        found = list_jobs_at(engine, root)
    if not found:
        raise with_hint(
            ConfigError(f"no job at {root} is known"), f"trinity-sync jobs reindex {root}"
        )
    job = found[0]
    steps = [
        CatalogStep(
            step=each.step,
            run=each.run,
            kinds=list(each.kinds),
            bytes=each.nbytes,
            committed_at=utc(each.committed_at),
            metrics=dict(each.metrics),
            held=list(each.held),
            reason=each.corruption or None,
            superseded_by=each.superseded_by or None,
            flow_run=job.flow_runs.get(each.step),
        )
        for each in reversed(job.steps)
    ]
    versions = [
        WeightVersionRow(each.step, each.run, each.source, utc(each.published_at))
        for each in reversed(job.versions)
    ]
    details = JobDetails(
        root=job.root,
        job=job.job,
        bytes=job.nbytes,
        would_free=_count_freed(job, keep),
        updated_at=utc(job.mirrored_at),
        settings=_list_settings(root) if root.is_dir() else [],
        steps=steps,
        versions=versions,
    )
    print_object("job", details, output, lambda: _print_details(details, output))
    if warning := _describe_outdated(Path(job.root), {each.step for each in job.steps}):
        typer.echo(warning, err=True)


def _print_details(details: JobDetails, output: Output) -> None:
    typer.echo(f"job {details.job} at {details.root}")
    typer.echo(
        f"{len(details.steps)} steps, {format_bytes(details.bytes)}; retention would free "
        f"{format_bytes(details.would_free)}; updated {format_time(details.updated_at)}"
    )
    if details.versions:
        newest = details.versions[0]
        typer.echo(f"newest weights: step {newest.step}, {newest.source}")
    for setting in details.settings:
        if setting.is_set:
            typer.echo(f"{setting.name} = {setting.value}")
    if details.steps:
        typer.echo("")
        print_table(CatalogStep, details.steps, output)


@jobs.command(
    "jobs set ckpts keep=last=3,every=100", "jobs set ckpts remote=s3://bucket/job",
    "jobs set ckpts keep=", name="set",
    note="They are in the root, where the training, the flows and the commands read them. "
        "Settings: keep, keep_weights and keep_quarantine (policies, as in prune), remote, "
        "remote_required, remote_keep, write_concurrency (all, per_rank, per_node or one), "
        "rank_timeout_s. An empty value restores the default. A root that does not exist is "
        "created, so a script can set them before the training starts.",
)  # fmt: skip
def set_job(
    root: Root,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...", autocompletion=complete_setting, help="Settings to change."
        ),
    ],
    output: Output = "table",
) -> None:
    """Change settings of a job."""
    from trinity_sync.catalog.mirror import try_mirror
    from trinity_sync.client.init_root import resolve_root
    from trinity_sync.client.job_settings import set_job_settings

    values: dict[str, str | None] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise with_hint(ConfigError(f"{change!r} is not NAME=VALUE"), "e.g. keep=last=3")
        values[name] = value or None
    if not root.exists():
        root = resolve_root(root)
        typer.echo(f"created {root}", err=True)
    set_job_settings(require_existing(root), values)
    try_mirror(read_settings(), root, [])
    rows = _list_settings(root)
    print_rows("settings", rows, output)


def _list_settings(root: Path) -> list[JobSettingRow]:
    from trinity_sync.storage.job_settings import (
        JobSettings,
        read_job_settings,
        read_set_job_settings,
    )

    given = read_set_job_settings(root)
    settings, default = read_job_settings(root), JobSettings()
    return [
        JobSettingRow(
            name=each.name,
            value=None if (value := getattr(settings, each.name)) == "" else value,
            default=None if (value := getattr(default, each.name)) == "" else value,
            is_set=each.name in given,
        )
        for each in fields(JobSettings)
    ]


@jobs.command("jobs reindex ckpts")
def reindex(roots: Roots, output: Output = "table") -> None:
    """Read the rows of jobs in the catalog again from their files."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import rebuild

    rows = []
    with open_catalog(get_catalog_url(read_settings())) as engine:
        for root in roots:
            with progress_bar("reading", of_steps=True) as on_progress:
                count = rebuild(engine, require_existing(root), on_progress=on_progress)
            rows.append(ReindexedJob(str(root), count))
    print_rows("jobs", rows, output)


@jobs.command("jobs check ckpts", note="Exit code 3 if catalog and files differ.")
def check(roots: Roots, output: Output = "table") -> None:
    """Compare the catalog with the files of jobs."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import find_differences

    rows = []
    with open_catalog(get_catalog_url(read_settings())) as engine:
        for root in roots:
            found = find_differences(engine, require_existing(root))
            rows.append(CheckedJob(str(root), "differs" if found else "ok", list(found)))
    print_rows("jobs", rows, output)
    different = [row.root for row in rows if row.differences]
    if different:
        typer.echo(f"hint: trinity-sync jobs reindex {' '.join(different)}", err=True)
    raise typer.Exit(PROBLEM_FOUND if different else DONE)


@jobs.command("jobs forget ckpts")
def forget(
    root: Annotated[
        Path,
        typer.Argument(
            autocompletion=complete_root, help="Root of the job, which may no longer exist."
        ),
    ],
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Remove a finished job from the catalog and from the scheduled flows of this node."""
    from trinity_sync.catalog.database import get_catalog_url, list_jobs_at, open_catalog
    from trinity_sync.catalog.mirror import remove_job
    from trinity_sync.orchestration.job_registry import list_registered_roots, unregister_job

    settings = read_settings()
    with open_catalog(get_catalog_url(settings)) as engine:
        registered = root.resolve() in list_registered_roots(settings)
        if not registered and not list_jobs_at(engine, root):
            raise with_hint(ConfigError(f"no job at {root} is known"), "trinity-sync jobs ls")
        confirm(
            f"remove {root} from the catalog and stop its scheduled verification and retention",
            yes=yes,
        )
        remove_job(engine, root)
    unregister_job(settings, root)
    text = f"removed {root} from the catalog; its files stay, and its next commit adds it again"
    print_object("job", ForgottenJob(str(root)), output, text)


def _count_freed(job: "JobSteps", keep: str) -> int:
    """Return the bytes that a policy for checkpoints would free."""
    from trinity_sync.retention.planner import Rules, plan_removals
    from trinity_sync.storage.job_settings import read_job_settings

    rules = Rules.of_job(read_job_settings(job.root), keep=keep)
    return plan_removals(job.steps, rules, time.time()).nbytes


def _describe_outdated(root: Path, known: set[int]) -> str:
    """Return a warning if the catalog does not list the steps on disk; "" if it does."""
    from trinity_sync.layout import MANIFEST, step_folder, steps_on_disk

    if not root.is_dir():
        return f"{root} does not exist here; if it was removed: trinity-sync jobs forget {root}"
    on_disk = {
        step for step in steps_on_disk(root) if (step_folder(root, step) / MANIFEST).exists()
    }
    if on_disk == known:
        return ""
    return (
        f"the catalog lacks {len(on_disk - known)} steps of {root} and has "
        f"{len(known - on_disk)} that were removed; run: trinity-sync jobs reindex {root}"
    )


@app.command("readers ckpts", "readers -o json", panel="Look at a job")
def readers(root: RootToRead, output: Output = "table") -> None:
    """Show which reader serves which version of the weights, and how stale it is."""
    report = _read_report(root)
    print_object("readers", report, output, lambda: _print_report(report, str(root), output))


def _read_report(root: Path) -> ReadersReport | None:
    from trinity_sync.weights.state_files import read_sync_report

    now = time.time()
    found = read_sync_report(require_existing(root), now)
    if found and found.lives is False:  # what it knew then says nothing about now
        now = found.written_at
        found = read_sync_report(root, now)
    if found is None:
        return None
    newest = found.newest
    return ReadersReport(
        version=newest.step if newest else None,
        run=newest.run if newest else None,
        source=newest.source if newest else None,
        running=found.lives,
        as_of=utc(now),
        trainer=found.trainer,
        explorers=found.explorers,
        readers=[
            ReaderRow(each.name, each.step, each.run, each.behind, utc(each.since), each.stale_s)
            for each in found.readers
        ],
    )


def _print_report(report: ReadersReport | None, root: str, output: Output) -> None:
    if report is None:
        typer.echo(
            f"no Synchronizer has worked in {root}; readers without one do not report which "
            "version they serve",
            err=True,
        )
        return
    version = "none"
    if report.version is not None:
        version = f"{report.version} of run {report.run}, from {report.source}"
    age = format_age(time.time() - report.as_of.timestamp())
    state = {
        True: "running",
        False: f"not running, as of {age} ago",
        None: "on another host",
    }[report.running]
    typer.echo(f"newest version: {version}")
    typer.echo(f"trainer: {report.trainer}; Synchronizer: {state}")
    for name, status in report.explorers.items():
        typer.echo(f"explorer {name}: {status}")
    if report.running is False:
        typer.echo("hint: trainer and explorers start it again by Synchronizer.get_actor", err=True)
    if report.readers:
        typer.echo("")
        print_table(ReaderRow, report.readers, output)


@app.command(
    "report ckpts", "report ckpts --html /tmp/ckpts.html", "report ckpts -o json",
    panel="Look at a job",
    note="Failures, flow runs and verifications come from the Prefect server, if one answers.",
)  # fmt: skip
def report(
    root: RootToRead,
    html: Annotated[Path, typer.Option("--html", help="File to write.")] = Path("report.html"),
    output: Output = "table",
) -> None:
    """Write an HTML page about a job: its health, failures with what to type, cost of saves.

    With -o json no page is written.
    """
    from trinity_sync.cli.report_html import render_report
    from trinity_sync.orchestration.report.collect import collect_report
    from trinity_sync.orchestration.report.facts import to_json

    if html.is_dir():
        raise ConfigError(f"{html} is a folder; pass a file as --html")
    found = collect_report(read_settings(), require_existing(root))
    if output in ("json", "jsonl"):
        print_object("report", to_json(found), output)
        return
    try:
        replace_file(html, render_report(found), sync=False)
    except OSError as error:
        raise ConfigError(f"cannot write {html}: {error.strerror}; pass another --html") from error
    if output == "name":
        typer.echo(html)
        return
    typer.echo(f"{found.health.status}: {found.health.sentence}")
    typer.echo(f"wrote {html}; open it in a browser")
