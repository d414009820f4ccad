"""Commands for checkpoints of PyTorch's Distributed Checkpoint: to-dcp, from-dcp."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trinity_sync.cli.app import (
    AsJson,
    Root,
    Step,
    app,
    format_size,
    print_json,
    resolve_step_argument,
)
from trinity_sync.cli.progress import progress_bar


@app.command(
    "to-dcp",
    rich_help_panel="Other formats",
    epilog="Examples:  [bold]trinity-sync to-dcp ckpts 40 out[/]  ·  "
    "[bold]trinity-sync to-dcp ckpts best out --component model[/]",
)
def to_dcp(
    root: Root,
    step: Step,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write, missing or empty.")
    ],
    role: Annotated[str, typer.Option(help="Whose state.")] = "actor",
    component: Annotated[
        list[str] | None, typer.Option(help="model or optim; both, as far as there are, if unset.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a step as a folder that torch.distributed.checkpoint.load reads."""
    from trinity_sync.formats.to_dcp import to_dcp as carry_out

    number = resolve_step_argument(root, step)
    with progress_bar("converting") as on_progress:
        done = carry_out(
            root, number, folder, role=role, components=component or (), on_progress=on_progress
        )
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder)})
        return
    typer.echo(
        f"{' and '.join(done.components)} of step {number}, {done.tensors} tensors, "
        f"{format_size(done.nbytes)}, are in {done.folder}"
    )


@app.command(
    "from-dcp",
    rich_help_panel="Other formats",
    epilog="Examples:  [bold]trinity-sync from-dcp out ckpts 40 --world-size 8[/]  ·  "
    "[bold]trinity-sync from-dcp out ckpts 40 --world-size 2 --device cpu --optim ''[/]",
)
def from_dcp(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What dcp.save wrote.")],
    root: Annotated[Path, typer.Argument(help="The job's folder; made if it is missing.")],
    step: Annotated[int, typer.Argument(min=0, help="A step that the job does not have.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that are to load it.")],
    role: Annotated[str, typer.Option(help="Whose state it becomes.")] = "actor",
    model: Annotated[str, typer.Option(help="Key of the model; '' for tensors at the top.")] = (
        "model"
    ),
    optim: Annotated[str, typer.Option(help="Key of the optimizer; '' leaves it out.")] = "optim",
    device: Annotated[str, typer.Option(help="Type of the ranks' devices.")] = "cuda",
    whole: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of tensors that every rank has whole: the model's buffers."),
    ] = None,
    metadata: Annotated[
        Path | None, typer.Option(help="Folder with fsdp_config.json and huggingface/.")
    ] = None,
) -> None:
    """Commit a step from a DCP checkpoint, in files that veRL's loader reads."""
    from trinity_sync.formats.from_dcp import from_dcp as carry_out

    with progress_bar("converting", of_steps=True) as on_progress:
        manifest = carry_out(
            folder,
            root,
            step,
            world_size=world_size,
            role=role,
            model=model,
            optim=optim,
            device_type=device,
            whole=whole or (),
            metadata=metadata,
            on_progress=on_progress,
        )
    typer.echo(f"step {manifest.step}, {format_size(manifest.nbytes)}, is committed in {root}")
