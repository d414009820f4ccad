"""Commands for copies in a remote: remote push, remote pull."""

from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import (
    App,
    Root,
    Step,
    app,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.output import Output, format_duration, print_object
from trinity_sync.cli.progress import progress_bar
from trinity_sync.cli.schema import CommittedStep, PushedStep
from trinity_sync.errors import ConfigError
from trinity_sync.layout import parse_number
from trinity_sync.orchestration.quantities import format_bytes

remote = App(
    no_args_is_help=True,
    help="Copies of steps in an object store or another file system. ls and verify take the URL of "
    "a remote as well.",
)
app.add_typer(remote, name="remote", rich_help_panel="Copies and other formats")

Url = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        help="URL of the job in the remote: s3://bucket/job, file:///copies/job (default: the "
        "job's remote).",
    ),
]
CREDENTIALS = (
    "Credentials come from the environment, for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_ENDPOINT_URL."
)


@remote.command(
    "remote push ckpts 40 s3://bucket/job",
    "remote push ckpts latest file:///backup/job --keep-last 5",
    note=CREDENTIALS,
)  # fmt: skip
def push(
    root: Root,
    step: Step,
    url: Url = None,
    keep_last: Annotated[
        int, typer.Option(min=0, help="Number of steps to keep in the remote; 0 keeps all.")
    ] = 0,
    read_back: Annotated[
        bool,
        typer.Option("--read-back", help="Read the uploaded files again, and compare digests."),
    ] = False,
    output: Output = "table",
) -> None:
    """Copy a committed step to a remote, its manifest last. Safe to run again."""
    from trinity_sync.remote.upload import replicate

    number = resolve_step_argument(root, step)
    url = url or _find_remote(root)
    with progress_bar("uploading") as on_progress:
        done = replicate(
            root, url, number, keep_last=keep_last, read_back=read_back, on_progress=on_progress
        )
    row = PushedStep(
        step=number,
        run=done.run,
        url=done.url,
        uploaded=done.uploaded,
        bytes=done.nbytes,
        seconds=done.seconds,
        removed=list(done.removed),
    )
    text = (
        f"copied step {number} to {done.url}: uploaded {done.uploaded} files, "
        f"{format_bytes(done.nbytes)}, in {format_duration(done.seconds)}"
    )
    if done.removed:
        text += f"\nremoved from the remote: steps {', '.join(map(str, done.removed))}"
    print_object("push", row, output, text)


@remote.command(
    "remote pull ckpts 40 s3://bucket/job", "remote pull ckpts latest s3://bucket/job",
    note=CREDENTIALS,
)  # fmt: skip
def pull(
    root: Root,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Number of the step, or latest.")],
    url: Url = None,
    output: Output = "table",
) -> None:
    """Download a step, compare all digests, and commit it in ROOT, which may be new."""
    from trinity_sync.remote.download import fetch

    number = parse_number(step)
    if step != "latest" and number is None:
        raise with_hint(
            ConfigError(f"{step!r} is neither the number of a step nor latest"),
            "a remote has no tags",
        )
    url = url or _find_remote(require_existing(root))
    with progress_bar("downloading") as on_progress:
        manifest, added = fetch(url, number, root, on_progress=on_progress)
    row = CommittedStep(manifest.step, manifest.run, str(root), manifest.nbytes, added)
    text = f"committed step {manifest.step}, {format_bytes(manifest.nbytes)}, in {root}"
    if not added:
        text = f"step {manifest.step} is already in {root}"
    print_object("step", row, output, text)


def _find_remote(root: Path) -> str:
    """Return the URL of a job's remote.

    Raises:
        ConfigError: The job has none.
    """
    from trinity_sync.storage.job_settings import read_job_settings

    url = read_job_settings(root).remote
    if not url:
        raise with_hint(
            ConfigError(f"the job at {root} has no remote"),
            f"pass its URL, or: trinity-sync jobs set {root} remote=URL",
        )
    return url
