"""Commands for committed steps: verify, reconcile, export."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table

from trinity_sync.cli.app import (
    AsJson,
    Root,
    Step,
    app,
    format_size,
    make_console,
    print_json,
    read_settings,
    require_existing,
    resolve_step_argument,
)
from trinity_sync.cli.progress import progress_bar
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import parse_number

if TYPE_CHECKING:
    from trinity_sync.storage.gc import Finding

DAY_S = 86_400


@app.command(
    rich_help_panel="Look after steps",
    epilog="Exit code 0 if everything that was read is valid, otherwise 1.\n\n"
    "Examples:  [bold]trinity-sync verify ckpts[/]  ·  [bold]trinity-sync verify ckpts --step 40[/]"
    "  ·  [bold]trinity-sync verify ckpts --sample 50GB[/]"
    "  ·  [bold]trinity-sync verify ckpts --load[/]",
)
def verify(
    root: Annotated[str, typer.Argument(help="Root of the job, or the URL of its remote.")],
    step: Annotated[str | None, typer.Option(help="Number or tag of a step to read.")] = None,
    newest: Annotated[
        int | None, typer.Option(min=1, help="Number of newest steps to read; 1 by default.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            help="Size of a sample of all steps to read, such as 50GB; other files each day."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Which sample to read; by default the number of the day."),
    ] = None,
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Load the newest checkpoint as a restart would, and measure it."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read files again and compare their digests; mark corrupted steps, which are not loaded.

    Steps in a remote are read and reported, but not marked.
    """
    if load:
        if "://" in root or step or newest or sample or seed is not None:
            raise ConfigError(
                "--load reads the newest checkpoint of a root; pass no other option and no URL"
            )
        _verify_by_loading(Path(root), as_json=as_json)
        return
    if "://" in root:
        if sample or seed is not None:
            raise ConfigError("--sample and --seed need a root, not a URL; pass --step or --newest")
        _verify_remote(root, step, newest or 1, as_json=as_json)
    from trinity_sync.storage.verify import check_files, choose_files, judge_steps

    if step is None and not sample:
        newest = newest or 1
    files = choose_files(
        require_existing(Path(root)),
        step=None if step is None else resolve_step_argument(Path(root), step),
        newest=newest or 0,
        sample_bytes=parse_size(sample) if sample else 0,
        seed=int(time.time()) // DAY_S if seed is None else seed,
    )
    with progress_bar("reading") as on_progress:
        checked = check_files(files, on_progress=on_progress)
    verified = judge_steps(checked)
    if as_json:
        print_json([asdict(each) for each in verified])
    elif not verified:
        typer.echo(f"nothing is committed in {root}")
    else:
        table = Table("step", "files", "size", "GB/s", "state")
        for column in range(4):
            table.columns[column].justify = "right"
        for each in verified:
            speed = f"{each.nbytes / each.seconds / 1e9:.2f}" if each.seconds else ""
            state = f"{each.state}: {each.wrong}" if each.wrong else each.state
            row = (str(each.step), str(each.files), format_size(each.nbytes), speed, state)
            table.add_row(*row)
        make_console().print(table)
    raise typer.Exit(1 if any(each.state == "corrupted" for each in verified) else 0)


def _verify_by_loading(root: Path, *, as_json: bool) -> None:
    from trinity_sync.storage.verify_load import load_newest

    done = load_newest(require_existing(root))
    if as_json:
        print_json(asdict(done) if done else None)
    elif done:
        typer.echo(
            f"loaded step {done.step}: {done.files} files, {format_size(done.nbytes)}, in "
            f"{done.seconds:.1f} s" + ", without digests" * (not done.checked)
        )
    else:
        typer.echo(f"nothing is committed in {root}")


def _verify_remote(url: str, step: str | None, newest: int, *, as_json: bool) -> NoReturn:
    from trinity_sync.remote.remote_root import Remote

    remote = Remote(url)
    number = None if step is None else parse_number(step)
    if step is not None and number is None:
        raise ConfigError(f"{step!r} is not a number, and a remote has no tags")
    found = remote.list_steps() if number is None else [remote.read_step(number)]
    manifests = sorted(
        (each.manifest for each in found if each.manifest), key=lambda each: (each.run, each.step)
    )
    if step is not None and not manifests:
        raise CommitError(
            f"step {step} is not committed at {remote.url}; see: trinity-sync ls {url}"
        )
    results = []
    with progress_bar("reading") as on_progress:
        total = sum(manifest.nbytes for manifest in manifests[-newest:])
        for manifest in manifests[-newest:]:
            problems = {
                record.path: remote.find_mismatch(
                    manifest.step, record, lambda n: on_progress(n, total)
                )
                for record in manifest.files
            }
            wrong = "; ".join(f"{path} {why}" for path, why in problems.items() if why)
            state = "corrupted" if wrong else "valid"
            results.append({"step": manifest.step, "state": state, "wrong": wrong})
    if as_json:
        print_json(results)
    else:
        for each in results:
            typer.echo(
                f"step {each['step']} is {each['state']}"
                + f": {each['wrong']}" * bool(each["wrong"])
            )
        if not results:
            typer.echo(f"nothing is committed at {remote.url}")
    raise typer.Exit(1 if any(each["wrong"] for each in results) else 0)


@app.command(
    rich_help_panel="Look after steps",
    epilog="Examples:  [bold]trinity-sync reconcile ckpts[/]  ·  "
    "[bold]trinity-sync reconcile ckpts --json[/]",
)
def reconcile(
    root: Root,
    grace: Annotated[
        float, typer.Option(min=0, help="Minimum age in seconds of unused files that are removed.")
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Repair what a crash left, and report it; safe at any time."""
    import asyncio

    found = asyncio.run(_reconcile(require_existing(root).resolve(), grace))
    if as_json:
        print_json([asdict(finding) for finding in found])
        return
    if not found:
        typer.echo("no problems found")
        return
    table = Table("state", "what", "why", "where")
    for finding in found:
        table.add_row(finding.state, finding.what, finding.why, finding.where)
    make_console().print(table)


async def _reconcile(root: Path, grace_s: float) -> "list[Finding]":
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from trinity_sync.orchestration.prefect_queries import find_api_url
    from trinity_sync.orchestration.recovery.reconcile import reconcile

    settings = read_settings()
    if url := find_api_url(settings):
        with temporary_settings({PREFECT_API_URL: url}):
            async with get_client() as client:
                if await client.api_healthcheck() is None:
                    return await reconcile(settings, [root], client, grace_s=grace_s)
    typer.echo("trinity-sync: no Prefect server answers; flow runs are not checked", err=True)
    return await reconcile(settings, [root], None, grace_s=grace_s)


@app.command(
    rich_help_panel="Look after steps",
    epilog="Examples:  [bold]trinity-sync export ckpts 40[/]  ·  "
    "[bold]trinity-sync export ckpts 40 --to model --dtype bf16[/]",
)
def export(
    root: Root,
    step: Step,
    to: Annotated[
        Path | None, typer.Option(help="New folder; by default <role>/huggingface of the step.")
    ] = None,
    role: Annotated[str, typer.Option(help="Role whose model is exported.")] = "actor",
    dtype: Annotated[str, typer.Option(help="keep, bf16, fp16 or fp32; needs --to.")] = "keep",
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a safetensors file.")
    ] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Import the model's own source files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a step in the Hugging Face format; an interrupted export continues."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from trinity_sync.formats.hf_export import export_step

    number = resolve_step_argument(root, step)
    with progress_bar("exporting") as on_progress:
        done = export_step(
            root,
            number,
            to=to,
            role=role,
            dtype=dtype,
            max_shard_bytes=parse_size(max_shard_size),
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"folder": str(done.folder), "files": done.files, "bytes": done.nbytes})
    else:
        typer.echo(f"{done.folder}: {len(done.files)} files, {format_size(done.nbytes)}")


def parse_size(text: str) -> int:
    """Parse a number of bytes such as ``5GB``, ``500 MB``, ``2GiB`` or ``1000``.

    Raises:
        ConfigError: The text is not a size.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[f"{letter}b"] = units[letter] = 1000**power
        units[f"{letter}ib"] = 1024**power
    number = text.strip().lower().rstrip("bgikmt ")
    unit = text.strip().lower().removeprefix(number).strip()
    try:
        nbytes = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"{text!r} is not a size; write it like 500MB, 5GB or 2GiB")
    return nbytes
