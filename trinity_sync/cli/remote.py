"""Commands for copies in a remote: replicate, fetch."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import (
    AsJson,
    Root,
    app,
    format_size,
    print_json,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.cli.progress import progress_bar
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import parse_number

Url = Annotated[
    str,
    typer.Argument(help="URL of the job in the remote: s3://bucket/job, file:///copies/job."),
]


@app.command(
    rich_help_panel="Remotes",
    epilog="Credentials come from the environment, for S3: AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL.\n\n"
    "Examples:  [bold]trinity-sync replicate ckpts s3://bucket/job --step 40[/]  ·  "
    "[bold]trinity-sync replicate ckpts file:///backup/job --newest --keep-last 5[/]",
)
def replicate(
    root: Root,
    url: Url,
    step: Annotated[str | None, typer.Option(help="Number or tag of a committed step.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Copy the newest checkpoint.")] = False,
    keep_last: Annotated[
        int, typer.Option(min=0, help="Number of steps to keep in the remote; 0 keeps all.")
    ] = 0,
    read_back: Annotated[
        bool,
        typer.Option("--read-back", help="Read the uploaded files again, and compare digests."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a committed step to a remote, its manifest last; files that are there are skipped."""
    from trinity_sync.remote.upload import replicate as replicate_step
    from trinity_sync.storage.discovery import find_newest as newest_in

    if newest == (step is not None):
        raise ConfigError("pass either --step STEP or --newest")
    if step is None:
        manifest = newest_in(require_existing(root))
        if manifest is None:
            raise CommitError(f"no checkpoint is committed in {root}")
        number = manifest.step
    else:
        number = resolve_step_argument(root, step)
    with progress_bar("uploading") as on_progress:
        done = replicate_step(
            root, url, number, keep_last=keep_last, read_back=read_back, on_progress=on_progress
        )
    if as_json:
        print_json(asdict(done))
        return
    typer.echo(
        f"copied step {number} to {done.url}: uploaded {done.uploaded} files, "
        f"{format_size(done.nbytes)}, in {done.seconds:.1f} s"
    )
    if done.removed:
        typer.echo(f"removed from the remote: steps {', '.join(map(str, done.removed))}")


@app.command(
    rich_help_panel="Remotes",
    epilog="Examples:  [bold]trinity-sync fetch s3://bucket/job 40 ckpts[/]  ·  "
    "[bold]trinity-sync fetch s3://bucket/job newest ckpts[/]",
)
def fetch(
    url: Url,
    step: Annotated[str, typer.Argument(help="Number of the step, or newest.")],
    root: Annotated[Path, typer.Argument(help="Root of the job, created if it is missing.")],
) -> None:
    """Download a step, compare all digests, and commit it in the root."""
    from trinity_sync.remote.download import fetch as fetch_step

    number = parse_number(step)
    if step != "newest" and number is None:
        raise typer.BadParameter(f"{step!r} is neither a number nor 'newest'", param_hint="STEP")
    with progress_bar("fetching") as on_progress:
        manifest, fetched = fetch_step(url, number, root, on_progress=on_progress)
    if fetched:
        typer.echo(f"committed step {manifest.step}, {format_size(manifest.nbytes)}, in {root}")
    else:
        typer.echo(f"step {manifest.step} is already in {root}")
