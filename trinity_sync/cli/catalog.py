"""Commands for the catalog: ls, rebuild, check, forget."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    app,
    format_size,
    format_time,
    make_console,
    print_json,
    read_settings,
    require_existing,
)
from trinity_sync.cli.progress import progress_bar
from trinity_sync.errors import ConfigError

catalog = typer.Typer(
    no_args_is_help=True,
    help="The SQL index of all jobs, which can be rebuilt from their files at any time.",
)
app.add_typer(catalog, name="catalog", rich_help_panel="Look at a job")

Roots = Annotated[list[Path], typer.Argument(help="Roots of jobs.")]


@catalog.command(
    "ls",
    epilog="Examples:  [bold]trinity-sync catalog ls[/]  ·  "
    "[bold]trinity-sync catalog ls --keep last=3[/]  ·  [bold]trinity-sync catalog ls --json[/]",
)
def list_jobs(
    keep: Annotated[
        str, typer.Option(help="Show how much this policy for checkpoints would free.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the jobs in the catalog without reading their steps; --json includes the steps."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.queries import list_jobs
    from trinity_sync.retention.planner import Rules, plan_removals
    from trinity_sync.storage.job_settings import read_job_settings

    settings = read_settings()
    with open_catalog(get_catalog_url(settings)) as engine:
        found = list_jobs(engine)
    rows: list[dict[str, Any]] = []
    for job in found:
        steps = [{**asdict(each), "flow_run": job.flow_runs.get(each.step)} for each in job.steps]
        rules = Rules.of_job(read_job_settings(job.root), keep=keep)
        freed = plan_removals(job.steps, rules, time.time()).nbytes
        rows.append({"job": job.job, "root": job.root, "bytes": job.nbytes, "would_free": freed})
        rows[-1].update(steps=steps, newest=job.steps[-1].step if job.steps else None)
        rows[-1]["versions"] = [asdict(each) for each in job.versions]
    if as_json:
        print_json(rows)
    else:
        table = Table("root", "steps", "newest", "weights", "size", "would be freed", "updated")
        for column in range(1, 6):
            table.columns[column].justify = "right"
        for job, row in zip(found, rows, strict=True):
            newest = "" if row["newest"] is None else str(row["newest"])
            weights = f"{job.versions[-1].step} ({job.versions[-1].source})" if job.versions else ""
            sizes = format_size(job.nbytes), format_size(row["would_free"])
            updated = format_time(job.mirrored_at).replace("T", " ")
            table.add_row(job.root, str(len(job.steps)), newest, weights, *sizes, updated)
        make_console().print(table)
    for job in found:
        if warning := _describe_outdated(Path(job.root), {each.step for each in job.steps}):
            typer.echo(warning, err=True)


@catalog.command(epilog="Example:  [bold]trinity-sync catalog rebuild ckpts[/]")
def rebuild(roots: Roots) -> None:
    """Rebuild the rows of jobs from their files."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import rebuild

    with open_catalog(get_catalog_url(read_settings())) as engine:
        for root in roots:
            with progress_bar("reading", of_steps=True) as on_progress:
                count = rebuild(engine, require_existing(root), on_progress=on_progress)
            typer.echo(f"{root}: {count} steps")


@catalog.command(
    epilog="Exit code 0 if catalog and files agree, else 1.\n\n"
    "Example:  [bold]trinity-sync catalog check ckpts[/]"
)
def check(roots: Roots) -> None:
    """Compare the catalog with the files of jobs."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import find_differences

    agrees = True
    with open_catalog(get_catalog_url(read_settings())) as engine:
        for root in roots:
            found = find_differences(engine, require_existing(root))
            agrees = agrees and not found
            typer.echo(f"{root}: the catalog {'; '.join(found) or 'agrees with the files'}")
            if found:
                typer.echo(f"to repair it, run: trinity-sync catalog rebuild {root}")
    raise typer.Exit(0 if agrees else 1)


@catalog.command(epilog="Example:  [bold]trinity-sync catalog forget ckpts[/]")
def forget(
    root: Annotated[Path, typer.Argument(help="Root of the job, which may no longer exist.")],
) -> None:
    """Remove a finished job from the catalog and from the scheduled flows of this node."""
    from trinity_sync.catalog.database import get_catalog_url, open_catalog
    from trinity_sync.catalog.mirror import remove_job
    from trinity_sync.orchestration.job_registry import unregister_job

    settings = read_settings()
    with open_catalog(get_catalog_url(settings)) as engine:
        known = remove_job(engine, root)
    if not unregister_job(settings, root) and not known:
        raise ConfigError(f"no job at {root} is known; see: trinity-sync catalog ls")
    typer.echo(
        f"removed {root} from the catalog; its files stay, and its next commit adds it again"
    )


def _describe_outdated(root: Path, known: set[int]) -> str:
    """Return a warning if the catalog does not list the steps on disk; "" if it does."""
    from trinity_sync.layout import MANIFEST, step_folder, steps_on_disk

    if not root.is_dir():
        return (
            f"{root} does not exist here; if it was removed, run: trinity-sync catalog forget "
            f"{root}"
        )
    on_disk = {
        step for step in steps_on_disk(root) if (step_folder(root, step) / MANIFEST).exists()
    }
    if on_disk == known:
        return ""
    return (
        f"the catalog lacks {len(on_disk - known)} steps of {root} and has "
        f"{len(known - on_disk)} that were removed; run: trinity-sync catalog rebuild {root}"
    )
