"""Commands that look after steps once they are committed: verify, reconcile, export."""

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
    output,
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
    epilog="Exit code 0 if all that was read is valid, otherwise 1.\n\n"
    "Examples:  [bold]trinity-sync verify ckpts[/]  ·  [bold]trinity-sync verify ckpts --step 40[/]"
    "  ·  [bold]trinity-sync verify ckpts --sample 50GB[/]"
    "  ·  [bold]trinity-sync verify ckpts --load[/]",
)
def verify(
    root: Annotated[
        str, typer.Argument(help="The job's folder, or the URL of its copies in a store.")
    ],
    step: Annotated[str | None, typer.Option(help="Read this step, or that of a tag.")] = None,
    newest: Annotated[
        int | None, typer.Option(min=1, help="Read so many newest steps; 1 if nothing is asked.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="Read about so much of all steps, such as 50GB; other files each day."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Which part a sample is; the number of the day if unset."),
    ] = None,
    load: Annotated[
        bool,
        typer.Option("--load", help="Load the newest checkpoint as a restart would, and time it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read files again and compare their digests; corrupted steps are marked and loaded no more.

    Steps in a store are read and named, and nothing is changed there.
    """
    if load:
        if "://" in root or step or newest or sample or seed is not None:
            raise ConfigError("--load is for the newest checkpoint of a job's folder alone")
        _verify_by_loading(Path(root), as_json=as_json)
        return
    if "://" in root:
        if sample or seed is not None:
            raise ConfigError("of a store, name --step or --newest; samples are of a job's folder")
        _verify_in_store(root, step, newest or 1, as_json=as_json)
    from trinity_sync.storage.verify import check_files, choose_files, judge_steps

    if step is None and not sample:
        newest = newest or 1
    files = choose_files(
        require_existing(Path(root)),
        step=None if step is None else resolve_step_argument(Path(root), step),
        newest=newest or 0,
        sample_bytes=bytes_of(sample) if sample else 0,
        seed=int(time.time()) // DAY_S if seed is None else seed,
    )
    with progress_bar("reading") as on_progress:
        checked = check_files(files, on_progress=on_progress)
    verdicts = judge_steps(checked)
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    elif not verdicts:
        typer.echo(f"nothing is committed in {root}")
    else:
        table = Table("step", "files", "size", "GB/s", "state")
        for column in range(4):
            table.columns[column].justify = "right"
        for verdict in verdicts:
            speed = f"{verdict.nbytes / verdict.seconds / 1e9:.2f}" if verdict.seconds else ""
            state = f"{verdict.state}: {verdict.wrong}" if verdict.wrong else verdict.state
            row = (str(verdict.step), str(verdict.files), format_size(verdict.nbytes), speed, state)
            table.add_row(*row)
        output().print(table)
    raise typer.Exit(1 if any(verdict.state == "corrupted" for verdict in verdicts) else 0)


def _verify_by_loading(root: Path, *, as_json: bool) -> None:
    from trinity_sync.storage.verify_load import load_newest

    done = load_newest(require_existing(root))
    if as_json:
        print_json(asdict(done) if done else None)
    elif done:
        typer.echo(
            f"step {done.step} loads: {done.files} files, {format_size(done.nbytes)}, in "
            f"{done.seconds:.1f} s" + ", without digests" * (not done.checked)
        )
    else:
        typer.echo(f"nothing is committed in {root}")


def _verify_in_store(url: str, step: str | None, newest: int, *, as_json: bool) -> NoReturn:
    from trinity_sync.remote.remote_root import Remote

    remote = Remote(url)
    number = None if step is None else parse_number(step)
    if step is not None and number is None:
        raise ConfigError(f"{step!r} is no number, and a store has no tags")
    there = remote.list_steps() if number is None else [remote.read_step(number)]
    known = sorted(
        (each.manifest for each in there if each.manifest), key=lambda each: (each.run, each.step)
    )
    if step is not None and not known:
        raise CommitError(
            f"step {step} is not committed at {remote.url}; see: trinity-sync ls {url}"
        )
    verdicts = []
    with progress_bar("reading") as on_progress:
        whole = sum(manifest.nbytes for manifest in known[-newest:])
        for manifest in known[-newest:]:
            found = {
                record.path: remote.find_mismatch(
                    manifest.step, record, lambda n: on_progress(n, whole)
                )
                for record in manifest.files
            }
            wrong = "; ".join(f"{path} {why}" for path, why in found.items() if why)
            state = "corrupted" if wrong else "valid"
            verdicts.append({"step": manifest.step, "state": state, "wrong": wrong})
    if as_json:
        print_json(verdicts)
    else:
        for each in verdicts:
            typer.echo(
                f"step {each['step']} is {each['state']}"
                + f": {each['wrong']}" * bool(each["wrong"])
            )
        if not verdicts:
            typer.echo(f"nothing is committed at {remote.url}")
    raise typer.Exit(1 if any(each["wrong"] for each in verdicts) else 0)


@app.command(
    rich_help_panel="Look after steps",
    epilog="Examples:  [bold]trinity-sync reconcile ckpts[/]  ·  "
    "[bold]trinity-sync reconcile ckpts --json[/]",
)
def reconcile(
    root: Root,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for which a file that nobody needs is left.")
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Mend what a crash left half done, here and now; safe at any time. Says what it did."""
    import asyncio

    found = asyncio.run(_reconciled(require_existing(root).resolve(), grace))
    if as_json:
        print_json([asdict(finding) for finding in found])
        return
    if not found:
        typer.echo("all is as it should be")
        return
    table = Table("state", "what", "why", "where")
    for finding in found:
        table.add_row(finding.state, finding.what, finding.why, finding.where)
    output().print(table)


async def _reconciled(root: Path, grace_s: float) -> "list[Finding]":
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
    typer.echo("trinity-sync: no Prefect server answers; runs are not looked at", err=True)
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
        Path | None, typer.Option(help="New folder; the step's <role>/huggingface if unset.")
    ] = None,
    role: Annotated[str, typer.Option(help="Whose model.")] = "actor",
    dtype: Annotated[str, typer.Option(help="keep, bf16, fp16 or fp32; needs --to.")] = "keep",
    max_shard_size: Annotated[str, typer.Option(help="Of a file of weights.")] = "5GB",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Import the model's own source files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a step's FSDP shards as a Hugging Face model; goes on with one that broke off."""
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
            max_shard_bytes=bytes_of(max_shard_size),
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"folder": str(done.folder), "files": done.files, "bytes": done.nbytes})
    else:
        typer.echo(f"{done.folder}: {len(done.files)} files, {format_size(done.nbytes)}")


def bytes_of(text: str) -> int:
    """A number of bytes as people write it: ``5GB``, ``500 MB``, ``2GiB``, ``1000``.

    Raises:
        ConfigError: it is none.
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
        raise ConfigError(f"{text!r} is no size; write it like 500MB, 5GB or 2GiB")
    return nbytes
