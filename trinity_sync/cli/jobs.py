"""Commands for jobs: jobs ls, set, forget; reconcile."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_sync.cli.app import (
    DONE,
    PROBLEM_FOUND,
    App,
    Root,
    Yes,
    app,
    confirm,
    is_root,
    read_settings,
    require_existing,
    with_hint,
)
from trinity_sync.cli.completion import complete_root, complete_setting
from trinity_sync.cli.output import Output, print_object, print_rows
from trinity_sync.cli.rows import ForgottenJob, JobRow, SettingRow
from trinity_sync.errors import ConfigError, PrefectApiError, TrinitySyncError
from trinity_sync.stack import list_missing_packages

if TYPE_CHECKING:
    from trinity_sync.settings import Settings

jobs = App(
    no_args_is_help=True,
    help="The jobs of this node, from the catalog: an SQL index of their files, which can be read "
    "from them again at any time.",
)
app.add_typer(jobs, name="jobs", rich_help_panel="Look at a job")


@jobs.command("jobs ls", "jobs ls -o json", name="ls")
def list_jobs(output: Output = "table") -> None:
    """List the jobs in the catalog, or without a stack those that have saved on this node.

    It warns of those in the catalog that have other steps on disk.
    """
    from trinity_sync.client.prefect_connection import knows_server

    settings, found = read_settings(), list[Any]()
    if (settings.saver == "stack" or knows_server(settings)) and not list_missing_packages():
        from trinity_sync.catalog import get_catalog_url, list_jobs, open_catalog

        with open_catalog(get_catalog_url(settings)) as engine:
            found = list_jobs(engine)
    rows = [_make_row(each.root, each.job, each.steps, each.mirrored_at) for each in found]
    columns = "root steps newest bytes updated_at"
    shown = rows or _list_jobs_of_node(settings)
    print_rows("jobs", shown, output, columns, empty="no job is known")
    for job in found:
        if warning := _describe_outdated(Path(job.root), {each.step for each in job.steps}):
            typer.echo(warning, err=True)


def _make_row(root: str, job: str, steps: Sequence[Any], updated_at: float) -> JobRow:
    newest = max(((each.run, each.step) for each in steps), default=(0, None))[1]
    nbytes = sum(each.nbytes for each in steps)
    return JobRow(root, job, len(steps), newest, nbytes, updated_at)


def _list_jobs_of_node(settings: "Settings") -> list[JobRow]:
    """Return the jobs that have saved on this node, but for roots that are gone or hang."""
    from trinity_sync.layout import steps_on_disk
    from trinity_sync.orchestration.report.steps import read_steps
    from trinity_sync.orchestration.root_threads import OTHERS_WAIT_S, RootVisits
    from trinity_sync.snapshot.identity import job_id, list_registered_roots
    from trinity_sync.snapshot.spool import list_job_spools

    def read(root: Path) -> JobRow | None:
        with suppress(TrinitySyncError, OSError):
            if root.is_dir():
                steps = [
                    row for row in read_steps(root, steps_on_disk(root), ()) if row.run is not None
                ]
                return _make_row(str(root), job_id(root), steps, time.time())
        return None

    spools = [job.read_root() for job in list_job_spools(settings.spool)]
    roots = sorted({*list_registered_roots(settings.home), *filter(None, spools)})
    found = RootVisits("jobs ls").visit(roots, read, limit_s=OTHERS_WAIT_S)
    return [each for each in found.values() if each]


@jobs.command(
    "jobs set ckpts", "jobs set ckpts keep=last=3,every=100",
    "jobs set ckpts remote=s3://bucket/job", "jobs set ckpts keep=", name="set",
    note="They are in the root, where the training, the flows and the commands read them. "
        "Settings: keep, keep_model, keep_weights and keep_quarantine (policies, as in prune), "
        "remote, remote_required, remote_keep, write_concurrency (all, per_rank, per_node or one), "
        "rank_timeout_s, on_nonfinite (warn or refuse), frozen (roles or components). An empty "
        "value restores the default. A root that does not exist is created, so a script can set "
        "them before the training starts.",
)  # fmt: skip
def set_job(
    root: Root,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            autocompletion=complete_setting,
            help="Settings to change; without them, show all.",
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Change settings of a job, and show them."""
    from trinity_sync.client.init_root import resolve_root, set_job_settings

    values: dict[str, str | None] = {}
    for change in changes or ():
        name, equals, value = change.partition("=")
        if not equals:
            raise with_hint(ConfigError(f"{change!r} is not NAME=VALUE"), "e.g. keep=last=3")
        values[name] = value or None
    if not changes or is_root(root):
        require_existing(root)
    else:
        root = resolve_root(root)
        typer.echo(f"created {root}", err=True)
    if values:
        set_job_settings(root, values)
    rows = _list_settings(root)
    print_rows("settings", rows, output, "name value default source")


def _list_settings(root: Path) -> list[SettingRow]:
    from trinity_sync.storage.job_settings import (
        JobSettings,
        read_job_settings,
        read_set_job_settings,
    )

    given, settings = read_set_job_settings(root), read_job_settings(root)
    return [
        SettingRow(name, getattr(settings, name), default, "job" if name in given else "default")
        for name, default in vars(JobSettings()).items()
    ]


@jobs.command("jobs forget ckpts", stack=True)
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
    from trinity_sync.catalog import get_catalog_url, list_jobs, open_catalog, remove_job
    from trinity_sync.snapshot.identity import list_registered_roots, registry_path

    settings = read_settings()
    with open_catalog(get_catalog_url(settings)) as engine:
        registered = root.resolve() in list_registered_roots(settings.home)
        if not registered and str(root.resolve()) not in [job.root for job in list_jobs(engine)]:
            raise with_hint(ConfigError(f"no job at {root} is known"), "trinity-sync jobs ls")
        confirm(
            f"remove {root} from the catalog and stop its scheduled verification and retention",
            yes=yes,
        )
        remove_job(engine, root)
    registry_path(settings.home, root).unlink(missing_ok=True)
    text = f"removed {root} from the catalog; its files stay, and its next commit adds it again"
    print_object("job", ForgottenJob(str(root)), output, text)


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
        f"{len(known - on_disk)} that were removed; run: trinity-sync reconcile {root}"
    )


@app.command("reconcile ckpts", "reconcile ckpts -o json", panel="Look after steps")
def reconcile(
    root: Root,
    grace: Annotated[
        float, typer.Option(min=0, help="Minimum age in seconds of unused files that are removed.")
    ] = 3600.0,
    output: Output = "table",
) -> None:
    """Repair what a crash left, and report it, with exit code 3 if a repair fails."""
    from trinity_sync.client.prefect_api import ask_server
    from trinity_sync.client.prefect_connection import knows_server
    from trinity_sync.orchestration.recovery.reconcile import read_unfinished_saves, reconcile

    settings, job, runs = read_settings(), require_existing(root).resolve(), None
    try:
        if knows_server(settings):
            runs = ask_server(settings, read_unfinished_saves)
    except PrefectApiError as error:
        typer.echo(f"flow runs are not checked: {error}", err=True)
    found = reconcile(settings, [job], runs, grace_s=grace)
    print_rows("findings", found, output, "status what reason", empty="no problems found")
    raise typer.Exit(PROBLEM_FOUND if any(each.state == "failed" for each in found) else DONE)
