"""Commands for the stack: up, join, run, down, status, deploy, worker."""

import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from trinity_sync.cli.app import AsJson, app, make_console, print_json, read_settings
from trinity_sync.cli.config import ConfigFile
from trinity_sync.errors import SpoolError, StackError

if TYPE_CHECKING:
    from trinity_sync.stack.embedded import StackStatus


@app.command(
    rich_help_panel="Run the stack",
    epilog='Examples:  [bold]trinity-sync up[/]  ·  [bold]eval "$(trinity-sync up --export)"[/]',
)
def up(
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of the Ray node; by default all of the machine.")
    ] = None,
    worker: Annotated[bool, typer.Option(help="Start the flow worker as well.")] = True,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time-out in seconds; the worker gets at least 60.")
    ] = 180.0,
    as_json: AsJson = False,
    export: Annotated[
        bool, typer.Option("--export", help="Print only export lines for the shell.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Start the missing services: Prefect server, Ray and flow worker."""
    from trinity_sync.stack import embedded, state_file

    try:
        settings = read_settings()
        with Console(stderr=True).status("starting the missing services"):
            state = embedded.up(settings, num_cpus=cpus, worker=worker, timeout_s=timeout)
    except BaseException:
        if export:
            typer.echo("false")  # the exit code of eval "$(...)"
        raise
    if export:
        typer.echo(_format_exports(state.environment))
        return
    found = embedded.status(settings)
    if as_json:
        print_json({**asdict(found), "environment": state.environment})
        return
    _print_status(found)
    typer.echo(f"\nFor the training's shell:\n\n{_format_exports(state.environment)}")
    if state.api_auth:
        invitation = settings.home / state_file.INVITATION
        typer.echo(
            f"\nOn another machine, with a copy of {invitation}:\n\ntrinity-sync join join.json"
        )


@app.command(
    rich_help_panel="Run the stack",
    epilog="Afterwards, up starts missing services, and down leaves the stack.\n\n"
    "Example:  [bold]trinity-sync join join.json[/]",
)
def join(
    invitation: Annotated[
        Path, typer.Argument(help="A copy of join.json from the home of the other machine's stack.")
    ],
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of the Ray node; by default all of the machine.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Join the stack of another machine: start a Ray node and a flow worker here."""
    from trinity_sync.stack import embedded

    settings = read_settings()
    with Console(stderr=True).status("starting a Ray node and a flow worker"):
        embedded.join(settings, invitation, num_cpus=cpus)
    _print_status(embedded.status(settings))


@app.command(
    rich_help_panel="Run the stack",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="The stack keeps running. Exit code of the command; 127 if there is no such command.\n\n"
    "Example:  [bold]trinity-sync run -- torchrun --nproc-per-node 8 train.py[/]",
)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The training's command.")
    ],
    config: ConfigFile = None,
) -> None:
    """Start the missing services, then run a training with the stack's environment variables."""
    from trinity_sync.stack import embedded

    with Console(stderr=True).status("starting the missing services"):
        state = embedded.up(read_settings())
    typer.echo(f"Prefect UI: {state.api_url.removesuffix('/api')}/runs", err=True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and inherited by the command
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **state.environment})
    except OSError as error:
        typer.echo(f"trinity-sync: cannot run {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(127) from None


@app.command(rich_help_panel="Run the stack", epilog="Example:  [bold]trinity-sync down[/]")
def down() -> None:
    """Stop the services that up started. Database, logs and images in memory stay."""
    from trinity_sync.snapshot.spool import list_job_spools
    from trinity_sync.stack import embedded

    settings = read_settings()
    ended = embedded.down(settings)
    typer.echo("stopped" if ended else f"nothing to stop: there is no stack in {settings.home}")
    with suppress(SpoolError, OSError):  # doctor reports it
        for job in list_job_spools(settings.spool):
            if (megabytes := job.bytes_used / 1e6) >= 1:
                sealed, torn = job.tickets()
                waiting = len(sealed) + len(torn)
                typer.echo(
                    f"{megabytes:,.0f} MB of images stay in memory for the next run of "
                    f"{job.root or 'an unknown root'}; "
                    + (
                        f"{waiting} of them are committed after the next up"
                        if waiting
                        else f"if that job is over: rm -r {shlex.quote(str(job.folder))}"
                    )
                )


@app.command(
    rich_help_panel="Run the stack",
    epilog="Exit code 0 if all services run, a worker is online, and the environment overrides "
    "none of them, otherwise 1.\n\n"
    "Examples:  [bold]trinity-sync status[/]  ·  [bold]trinity-sync status --json[/]",
)
def status(as_json: AsJson = False) -> None:
    """Show the services, their addresses, and whether a worker is online."""
    from trinity_sync.stack import embedded

    found = embedded.status(read_settings())
    if as_json:
        print_json(asdict(found))
    else:
        _print_status(found)
    works = all(part.state in ("running", "external") for part in found.parts[:2])
    raise typer.Exit(0 if works and found.workers_online and not found.elsewhere else 1)


@app.command(
    rich_help_panel="Run the stack",
    epilog="Example:  [bold]PREFECT_API_URL=http://prefect.internal/api trinity-sync deploy[/]",
)
def deploy(config: ConfigFile = None) -> None:
    """Create or update the work pool, deployments and automations on a Prefect server."""
    from trinity_sync.orchestration import deploy
    from trinity_sync.settings import StackSettings
    from trinity_sync.stack import embedded

    stack = StackSettings()
    state = embedded.find(read_settings())
    url = os.environ.get("PREFECT_API_URL") or (state.api_url if state else None)
    for name in deploy.deploy(stack, url):
        typer.echo(f"{name} in work pool {stack.worker.pool}")


@app.command(
    rich_help_panel="Run the stack",
    epilog="Example:  [bold]PREFECT_API_URL=http://prefect.internal/api "
    "TRINITY_SYNC_STACK__RAY__ADDRESS=10.0.0.4:6379 trinity-sync worker[/]",
)
def worker(config: ConfigFile = None) -> None:
    """Run a flow worker in the foreground, for the services of the settings or of up."""
    from trinity_sync.settings import StackSettings
    from trinity_sync.stack import embedded, services

    settings, stack = read_settings(), StackSettings()
    state = (embedded.find(settings) or services.StackState()).with_external(
        os.environ.get(embedded.API_URL, ""), stack.ray.address
    )
    for variable, named in (
        (embedded.API_URL, state.api_url),
        (embedded.RAY_ADDRESS, state.ray_address),
    ):
        if not named:
            raise StackError(f"{variable} is not set and no stack runs. Run trinity-sync up first.")
    if not services.accepts_connections(
        state.ray_address
    ):  # Ray itself retries for minutes; a server may be away
        raise StackError(
            f"nothing answers at {embedded.RAY_ADDRESS}={state.ray_address}. Start Ray there, or "
            "correct it; trinity-sync up starts the stack's own"
        )
    env = services.build_environment(settings, stack, state)
    services.make_home(settings.home)
    os.chdir(settings.home)  # python -m imports from it first, and it has no flows
    os.execve(sys.executable, [sys.executable, "-m", services.WORKER_MODULE], env)


def _print_status(found: "StackStatus") -> None:
    table = Table("part", "state", "pid", "where", "log")
    for part in found.parts:
        pid = str(part.pid or "")
        table.add_row(part.name, part.state, pid, part.url, part.log)
    console = make_console()
    console.print(table)
    for sentence in found.elsewhere:
        console.print(sentence, highlight=False)
    if found.changed:
        console.print("Settings that the running stack does not have:", highlight=False)
        for change in found.changed:
            console.print(f"  {change}", highlight=False, markup=False)
        console.print("Apply them with: trinity-sync restart", highlight=False)
    if found.problem:
        console.print(found.problem, highlight=False)
    elif found.workers_online is not None:
        console.print(
            f"work pool {found.pool}: {found.workers_online} worker(s) online, "
            f"{found.waiting_runs} run(s) waiting",
            highlight=False,
        )


def _format_exports(environment: dict[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
