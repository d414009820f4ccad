"""The ``trinity-sync`` command: run the stack, look at checkpoints.

What is heavy (torch, Prefect, Ray) is imported by the commands that need it, so that help and
``ls`` are instant. Errors that a user can mend are one sentence on stderr and exit code 1.
"""

import json
import os
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from trinity_sync.errors import (
    CommitError,
    ConfigError,
    ManifestError,
    StackError,
    TrinitySyncError,
)

if TYPE_CHECKING:
    from trinity_sync.orchestration.stack import StackStatus
    from trinity_sync.settings import Settings
    from trinity_sync.storage.manifest import Manifest


class _Plain(typer.core.TyperGroup):
    """Errors as a sentence instead of a traceback; Ctrl-C as the shell expects it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see the class."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (TrinitySyncError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"trinity-sync: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Plain,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checkpoints for RL training: run the stack that saves them, look at what was saved.\n\n"
    "Settings come from the environment: TRINITY_SYNC_HOME is the stack's folder, PREFECT_API_URL "
    "and RAY_ADDRESS name a Prefect server and a Ray cluster to use instead of starting them.",
    epilog="Examples:  [bold]trinity-sync up[/]  ·  [bold]trinity-sync status[/]  ·  "
    "[bold]trinity-sync ls ckpts[/]  ·  [bold]trinity-sync show ckpts 40[/]  ·  "
    "[bold]trinity-sync down[/]",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Root = Annotated[
    Path, typer.Argument(help="The job's folder, which holds the global_step_N folders.")
]


@app.command(
    epilog='Examples:  [bold]trinity-sync up[/]  ·  [bold]eval "$(trinity-sync up --export)"[/]'
)
def up(
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of the Ray node; all of the machine's if unset.")
    ] = None,
    worker: Annotated[bool, typer.Option(help="Start the flow worker, too.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that it may take.")] = 180.0,
    as_json: AsJson = False,
    export: Annotated[
        bool, typer.Option("--export", help="Print nothing but lines for the shell to evaluate.")
    ] = False,
) -> None:
    """Start Prefect server, Ray and flow worker, or what is missing of them."""
    from trinity_sync.orchestration import stack

    settings = _settings()
    state = stack.up(settings, num_cpus=cpus, worker=worker, timeout_s=timeout)
    if export:
        typer.echo(_exports(state.environment))
        return
    found = stack.status(settings)
    if as_json:
        _print_json({**asdict(found), "environment": state.environment})
        return
    _print_status(found)
    typer.echo(f"\nFor the training's shell:\n\n{_exports(state.environment)}")


@app.command(epilog="Example:  [bold]trinity-sync down[/]")
def down() -> None:
    """Stop what up has started. Database, logs and unsaved images stay."""
    from trinity_sync.orchestration import stack

    settings = _settings()
    ended = stack.down(settings)
    typer.echo("stopped" if ended else f"nothing to stop: there is no stack in {settings.home}")


@app.command(
    epilog="Exit code 0 if all parts work and a worker is online, else 1.\n\n"
    "Examples:  [bold]trinity-sync status[/]  ·  [bold]trinity-sync status --json[/]"
)
def status(as_json: AsJson = False) -> None:
    """Show what runs, where, and whether a worker is online."""
    from trinity_sync.orchestration import stack

    found = stack.status(_settings())
    if as_json:
        _print_json(asdict(found))
    else:
        _print_status(found)
    works = all(part.state in ("running", "external") for part in found.parts[:2])
    raise typer.Exit(0 if works and found.workers_online else 1)


@app.command(
    epilog="Example:  [bold]PREFECT_API_URL=http://prefect.internal/api trinity-sync deploy[/]"
)
def deploy() -> None:
    """Register work pool and deployments on a Prefect server; twice is as good as once."""
    from trinity_sync.orchestration import deploy, stack

    settings = _settings()
    state = stack.find(settings)
    url = os.environ.get("PREFECT_API_URL") or (state.api_url if state else None)
    for name in deploy.deploy(settings, url):
        typer.echo(f"{name} in work pool {settings.work_pool}")


@app.command(
    epilog="Example:  [bold]PREFECT_API_URL=http://prefect.internal/api RAY_ADDRESS=10.0.0.4:6379 "
    "trinity-sync worker[/]"
)
def worker() -> None:
    """Run a flow worker in the foreground, for the stack of up or that of the environment."""
    from trinity_sync.orchestration import parts, stack

    settings = _settings()
    env = parts.environment(settings, stack.find(settings) or parts.StackState())
    for variable in ("PREFECT_API_URL", "RAY_ADDRESS"):
        if not env.get(variable):
            raise StackError(f"{variable} is not set and no stack runs. Run trinity-sync up first.")
    settings.home.mkdir(parents=True, exist_ok=True)
    os.chdir(settings.home)  # python -m looks there first, and this folder holds no flows
    os.execve(sys.executable, [sys.executable, "-m", parts.WORKER_MODULE], env)


@app.command(
    "ls",
    epilog="Examples:  [bold]trinity-sync ls ckpts[/]  ·  [bold]trinity-sync ls ckpts --json[/]",
)
def list_steps(root: Root, as_json: AsJson = False) -> None:
    """List the steps of a job: what is committed, whole, and pointed at."""
    rows = _steps(_existing(root))
    if as_json:
        _print_json(rows)
        return
    if not rows:
        typer.echo(f"no steps in {root}")
        return
    table = Table("step", "run", "kinds", "files", "size", "committed", "pointed at by", "state")
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(
            str(row["step"]),
            str(row["run"] or ""),
            ", ".join(row["kinds"]),
            str(row["files"] or ""),
            _size(row["bytes"]) if row["kinds"] else "",
            row["committed"].replace("T", " "),
            ", ".join(row["pointers"]),
            row["state"],
        )
    _console().print(table)


@app.command(
    epilog="Examples:  [bold]trinity-sync show ckpts 40[/]  ·  "
    "[bold]trinity-sync show ckpts 40 --json[/]"
)
def show(
    root: Root,
    step: Annotated[int, typer.Argument(min=0, help="Number of the step.")],
    as_json: AsJson = False,
) -> None:
    """Show one committed step: its files with sizes and digests, and its receipts."""
    from trinity_sync.layout import step_folder
    from trinity_sync.storage.manifest import read_manifest
    from trinity_sync.storage.steps import require_committed

    manifest = read_manifest(_existing(root), step) or require_committed(root, step)
    folder = step_folder(root, step)
    sizes = {record.path: _size_on_disk(folder / record.path) for record in manifest.files}
    whole = all(sizes[record.path] == record.nbytes for record in manifest.files)
    if as_json:
        _print_json({**asdict(manifest), "bytes": manifest.nbytes, "whole": whole})
        return
    console = _console()
    console.print(
        f"step {step} of run {manifest.run}: {', '.join(manifest.kinds)}, committed "
        f"{_when(manifest.committed_at).replace('T', ' ')}, {manifest.nbytes:,} bytes",
        highlight=False,
    )
    table = Table("file", "bytes", "digest", "state")
    table.columns[1].justify = "right"
    for record in manifest.files:
        found = sizes[record.path]
        state = "missing" if found is None else "whole" if found == record.nbytes else "cut"
        table.add_row(record.path, f"{record.nbytes:,}", record.digest, state)
    console.print(table)
    if manifest.receipts:
        receipts = Table("saved by function", "rank", "seconds", "files")
        for receipt in manifest.receipts:
            files = "\n".join(receipt.files)
            receipts.add_row(receipt.name, str(receipt.rank), f"{receipt.seconds:.2f}", files)
        console.print(receipts)


def _steps(root: Path) -> list[dict[str, Any]]:
    from trinity_sync.layout import KINDS, steps_on_disk
    from trinity_sync.storage.iteration import read_iteration
    from trinity_sync.storage.manifest import read_manifest

    pointers = {kind: read_iteration(root, kind) for kind in KINDS}
    rows = []
    for step in steps_on_disk(root):
        try:
            manifest = read_manifest(root, step)
            state = _state(root, step) if manifest else "not committed"
        except ManifestError:
            manifest, state = None, "damaged manifest"
        pointed = [kind for kind, target in pointers.items() if target == step]
        rows.append({"step": step, **_summary(manifest), "pointers": pointed, "state": state})
    return rows


def _summary(manifest: "Manifest | None") -> dict[str, Any]:
    if manifest is None:
        return {"run": None, "kinds": [], "files": 0, "bytes": 0, "committed": ""}
    return {
        "run": manifest.run,
        "kinds": list(manifest.kinds),
        "files": len(manifest.files),
        "bytes": manifest.nbytes,
        "committed": _when(manifest.committed_at),
    }


def _state(root: Path, step: int) -> str:
    from trinity_sync.storage.steps import require_committed

    try:
        require_committed(root, step)
    except CommitError:
        return "damaged"
    return "whole"


def _settings() -> "Settings":
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from trinity_sync.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        wrong = "; ".join(
            f"TRINITY_SYNC_{str(each['loc'][0]).upper()}={each['input']}: {each['msg']}"
            for each in error.errors()
        )
        raise ConfigError(f"settings cannot be used: {wrong}. Correct or unset them.") from error
    except SettingsError as error:
        raise ConfigError(f"settings cannot be used: {error}. Correct or unset them.") from error


def _existing(root: Path) -> Path:
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder; pass the job's root, e.g. trinity-sync ls ckpts"
        )
    return root


def _print_status(found: "StackStatus") -> None:
    table = Table("part", "state", "pid", "where", "log")
    for part in found.parts:
        pid = str(part.pid or "")
        table.add_row(part.name, part.state, pid, part.url, part.log)
    console = _console()
    console.print(table)
    if found.problem:
        console.print(found.problem, highlight=False)
    elif found.workers_online is not None:
        console.print(
            f"work pool {found.pool}: {found.workers_online} worker(s) online, "
            f"{found.waiting_runs} run(s) waiting",
            highlight=False,
        )


def _exports(environment: dict[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _console() -> Console:
    """A console that cuts nothing when its output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _size_on_disk(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


if __name__ == "__main__":
    app()
