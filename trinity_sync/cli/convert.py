"""Commands for PyTorch Distributed Checkpoint (DCP): to-dcp, from-dcp."""

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
    role: Annotated[str, typer.Option(help="Role of the state.")] = "actor",
    component: Annotated[
        list[str] | None, typer.Option(help="model or optim; by default those that the step has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a step to a folder that torch.distributed.checkpoint.load reads."""
    from trinity_sync.formats.to_dcp import to_dcp as convert

    number = resolve_step_argument(root, step)
    with progress_bar("converting") as on_progress:
        done = convert(
            root, number, folder, role=role, components=component or (), on_progress=on_progress
        )
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder)})
        return
    typer.echo(
        f"wrote {' and '.join(done.components)} of step {number}, {done.tensors} tensors, "
        f"{format_size(done.nbytes)}, to {done.folder}"
    )


@app.command(
    "from-dcp",
    rich_help_panel="Other formats",
    epilog="Examples:  [bold]trinity-sync from-dcp out ckpts 40 --world-size 8[/]  ·  "
    "[bold]trinity-sync from-dcp out ckpts 40 --world-size 2 --device cpu --optim ''[/]",
)
def from_dcp(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that dcp.save wrote.")],
    root: Annotated[Path, typer.Argument(help="Root of the job, created if it is missing.")],
    step: Annotated[int, typer.Argument(min=0, help="New step of the job.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks that will load it.")],
    role: Annotated[str, typer.Option(help="Role of the new state.")] = "actor",
    model: Annotated[
        str, typer.Option(help="Key of the model; '' for tensors at the top level.")
    ] = ("model"),
    optim: Annotated[str, typer.Option(help="Key of the optimizer; '' for none.")] = "optim",
    device: Annotated[str, typer.Option(help="Device type of the ranks.")] = "cuda",
    whole: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of replicated tensors, such as the model's buffers."),
    ] = None,
    metadata: Annotated[
        Path | None, typer.Option(help="Folder with fsdp_config.json and huggingface/.")
    ] = None,
) -> None:
    """Convert a DCP checkpoint to a committed step that veRL's loader reads."""
    from trinity_sync.formats.from_dcp import from_dcp as convert

    with progress_bar("converting", of_steps=True) as on_progress:
        manifest = convert(
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
    typer.echo(f"committed step {manifest.step}, {format_size(manifest.nbytes)}, in {root}")
