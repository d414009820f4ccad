"""Commands for copies and other formats: remote push, remote pull, export."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from trinity_sync.cli.app import (
    App,
    Role,
    Root,
    Step,
    app,
    require_existing,
    resolve_step_argument,
    with_hint,
)
from trinity_sync.cli.output import Output, print_object, progress_bar
from trinity_sync.errors import ConfigError
from trinity_sync.layout import parse_number
from trinity_sync.orchestration.quantities import format_bytes, format_duration, parse_size

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
    "remote push ckpts 40 s3://bucket/job", "remote push ckpts latest", note=CREDENTIALS,
)  # fmt: skip
def push(root: Root, step: Step, url: Url = None, output: Output = "table") -> None:
    """Copy a committed step to a remote, its manifest last. Safe to run again."""
    from trinity_sync.remote.upload import replicate

    number = resolve_step_argument(root, step)
    url = url or _find_remote(root)
    with progress_bar("uploading") as on_progress:
        done = replicate(root, url, number, on_progress=on_progress)
    text = (
        f"copied step {number} to {done.url}: uploaded {done.uploaded} files, "
        f"{format_bytes(done.nbytes)}, in {format_duration(done.seconds)}"
    )
    print_object("push", done, output, text)


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
    from trinity_sync.orchestration.report.steps import read_step
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
    text = f"committed step {manifest.step}, {format_bytes(manifest.nbytes)}, in {root}"
    if not added:
        text = f"step {manifest.step} is already in {root}"
    print_object("step", read_step(root, manifest.step), output, text)


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


@app.command(
    "merge ckpts last=5 merges", "merge ckpts 100,200,300 merges --weights 1,1,2",
    "merge ckpts best=3:reward:max merges --ema 0.9", name="merge",
    panel="Copies and other formats",
    note="OUT is a root of its own for ls, show, verify and export; nothing resumes from it.",
)  # fmt: skip
def merge(
    root: Root,
    steps: Annotated[
        str,
        typer.Argument(
            metavar="STEPS",
            help="Steps with commas between them, and words of a policy: last=5, every=100, "
            "newer=2d, best=3:reward:max.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Root of merges, new or of earlier merges.")
    ],
    weights: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="A number for each step (default: all are equal)."),
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option(metavar="DECAY", help="Decay of a moving average over the steps, below 1."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Tensors that are not averaged: those of the newest step."
        ),
    ] = None,
    role: Role = "actor",
    output: Output = "table",
) -> None:
    """Average the weights of steps, as a weights-only step of the root OUT."""
    from trinity_sync.formats.merge import merge_steps
    from trinity_sync.orchestration.report.steps import read_step

    try:
        given = [float(each) for each in weights.split(",")] if weights else []
    except ValueError as error:
        raise ConfigError(f"--weights {weights}: {error}") from error
    base, names = require_existing(root), exclude or ()
    with progress_bar("merging") as told:
        done = merge_steps(
            base, steps, out, weights=given, ema=ema, role=role, exclude=names, on_progress=told
        )
    text = f"committed step {done.step}, {format_bytes(done.nbytes)}, in {out}, the mean of:"
    text = "\n  ".join([text, *map(str, done.parents)])
    print_object("step", read_step(out, done.step), output, text)


export = App(no_args_is_help=True, help="Write a step in the format of another library.")
app.add_typer(export, name="export", rich_help_panel="Copies and other formats")


class DcpComponent(StrEnum):
    """Components that DCP checkpoints contain."""

    MODEL = "model"
    OPTIM = "optim"


@export.command(
    "export hf ckpts 40", "export hf ckpts best model --dtype bf16", name="hf",
    note="An interrupted export continues.",
)  # fmt: skip
def export_hf(
    root: Root,
    step: Step,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="New folder (default: ROLE/huggingface of the step)."
        ),
    ] = None,
    role: Role = "actor",
    dtype: Annotated[
        Literal["keep", "bf16", "fp16", "fp32"],
        typer.Option(help="Type of the weights; another one than the trained needs FOLDER."),
    ] = "keep",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum size of each safetensors file.")
    ] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Import the model's own source files.")
    ] = False,
    output: Output = "table",
) -> None:
    """Write the model of a step in the Hugging Face format."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from trinity_sync.formats.hf_export import export_step

    number = resolve_step_argument(root, step)
    with progress_bar("exporting") as on_progress:
        done = export_step(
            root,
            number,
            to=folder,
            role=role,
            dtype=dtype,
            max_shard_bytes=parse_size(max_shard_size),
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    text = f"wrote {len(done.files)} files, {format_bytes(done.nbytes)}, to {done.folder}"
    print_object("export", done, output, text)


@export.command(
    "export dcp ckpts 40 out", "export dcp ckpts best out --component model", name="dcp",
)  # fmt: skip
def export_dcp(
    root: Root,
    step: Step,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write, missing or empty.")
    ],
    role: Role = "actor",
    component: Annotated[
        list[DcpComponent] | None,
        typer.Option(help="Component to write (default: those that the step has)."),
    ] = None,
    output: Output = "table",
) -> None:
    """Convert a step to a folder that torch.distributed.checkpoint.load reads."""
    from trinity_sync.formats.dcp import to_dcp

    number = resolve_step_argument(root, step)
    components = [each.value for each in component or ()]
    with progress_bar("converting") as on_progress:
        done = to_dcp(
            root, number, folder, role=role, components=components, on_progress=on_progress
        )
    text = (
        f"wrote {' and '.join(done.components)} of step {number}, {done.tensors} tensors, "
        f"{format_bytes(done.nbytes)}, to {done.folder}"
    )
    print_object("export", done, output, text)
