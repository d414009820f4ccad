"""Commands for the stack: up, down, restart, status, logs, ui, env, run, join, deploy, worker."""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, get_args

import typer

from trinity_sync.cli.app import DONE, PROBLEM_FOUND, Yes, app, confirm, read_settings, with_hint
from trinity_sync.cli.config import ConfigFile
from trinity_sync.cli.output import Output, print_object, print_rows, print_table
from trinity_sync.cli.rows import DeploymentRow, StoppedStack, UiReport
from trinity_sync.errors import PrefectApiError, SpoolError, StackError, from_extra
from trinity_sync.orchestration.quantities import format_duration

if TYPE_CHECKING:
    from trinity_sync.settings import Settings
    from trinity_sync.stack.local_stack import StackStatus
    from trinity_sync.stack.services import StackState


Service = Literal["server", "ray", "worker", "saver"]
Timeout = Annotated[float, typer.Option(min=1, help="Time-out in seconds of each service.")]


@app.command("up", "up --block", "up -o json", panel="Run the stack", stack=True)
def up(
    timeout: Timeout = 180.0,
    block: Annotated[
        bool, typer.Option("--block", help="Stay, and start again what ends; stop all at SIGTERM.")
    ] = False,
    config: ConfigFile = None,
    output: Output = "table",
) -> None:
    """Start the stack: Prefect server, Ray and flow worker.

    What has not started before is started alone, and missing deployments are made again. If the
    server or Ray has died or does not answer, all services are stopped and started again, at the
    same addresses.
    """
    from trinity_sync.stack import local_stack

    settings, start = read_settings(), time.monotonic()
    if block:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _tell_progress():
        state = local_stack.up(settings, timeout_s=timeout)
    seconds = time.monotonic() - start
    report = local_stack.status(settings)
    print_object("stack", report, output, lambda: _print_ready(settings, state, report, seconds))
    if block:
        try:
            local_stack.keep_up(settings, state, timeout_s=timeout)
        except KeyboardInterrupt:
            local_stack.down(settings)


@contextmanager
def _tell_progress() -> Iterator[None]:
    """Write to stderr which services of a stack that starts are ready, and what it waits for."""
    logger, handler = logging.getLogger("trinity_sync.stack.daemon"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@app.command("restart", panel="Run the stack", stack=True)
def restart(timeout: Timeout = 180.0, config: ConfigFile = None, output: Output = "table") -> None:
    """Stop the services that up started, and start them again, with the settings of now.

    The file with the settings is that of up, unless another is named. Saves go on: images wait in
    shared memory meanwhile.
    """
    from trinity_sync.settings import use_config_file
    from trinity_sync.stack import local_stack, state_file

    settings = read_settings()
    state = state_file.read_state(settings.home)
    with use_config_file(state.config if state else ""), _tell_progress():
        local_stack.up(settings, timeout_s=timeout, anew=True)
    report = local_stack.status(settings)
    print_object("stack", report, output, lambda: _print_stack(report))


@app.command(
    "join join.json", panel="Run the stack", stack=True,
    note="Afterwards, up starts them again if they have ended, and down leaves the stack.",
)  # fmt: skip
def join(
    invitation: Annotated[
        Path, typer.Argument(help="A copy of join.json from the home of the other machine's stack.")
    ],
    config: ConfigFile = None,
    output: Output = "table",
) -> None:
    """Join the stack of another machine: start a Ray node and a flow worker here."""
    from trinity_sync.stack import local_stack

    settings = read_settings()
    with _tell_progress():
        local_stack.join(settings, invitation)
    report = local_stack.status(settings)
    print_object("stack", report, output, lambda: _print_stack(report))


@app.command(
    "run -- torchrun --nproc-per-node 8 train.py", panel="Run the stack", stack=True,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    note="The stack keeps running. Exit code of the command; 127 if there is no such command.",
)  # fmt: skip
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The training's command.")
    ],
    config: ConfigFile = None,
) -> None:
    """Start the stack, if it does not run; run a training with its environment variables."""
    from trinity_sync.stack import local_stack

    settings = read_settings()
    with _tell_progress():
        state = local_stack.up(settings)
    asks = "; its password: trinity-sync ui" if state.api_auth else ""
    typer.echo(f"Prefect UI: {_ui_url(state.api_url)}/runs{asks}", err=True)
    try:
        _exec(command, {**os.environ, **state.environment})
    except OSError as error:
        typer.echo(f"error: cannot run {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(127) from None


@app.command(
    "down", "down --yes", panel="Run the stack",
    note="Database, logs and images in shared memory stay. It asks first if images are not "
        "committed yet; the next up commits them, unless the machine restarts before.",
)  # fmt: skip
def down(yes: Yes = False, output: Output = "table") -> None:
    """Stop the services that up started."""
    from trinity_sync.stack import local_stack, state_file

    settings = read_settings()
    waiting = 0
    with suppress(SpoolError, OSError):  # doctor reports it
        waiting = sum(len(job.steps) for job in local_stack.list_waiting_saves(settings.spool))
    if state_file.read_state(settings.home) is not None and waiting:
        confirm(
            f"stop the stack while {waiting} steps in shared memory are not committed, which a "
            "restart of the machine would lose",
            yes=yes,
        )
    stopped = local_stack.down(settings)
    text = "stopped" if stopped else f"nothing to stop: there is no stack in {settings.home}"
    print_object("stack", StoppedStack(str(settings.home), stopped), output, text)


@app.command(
    "status", "status -o json", "status --prometheus trinity_sync.prom", panel="Run the stack",
    note="Exit code 3 if a service that is used does not run or answer, no worker is online, a "
        "deployment is missing, something is paused, the server's disk is full, or the environment "
        "overrides a service; or saves wait for a saver, and none lives or answers.",
)  # fmt: skip
def status(
    prometheus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the Prometheus gauges of this node and of its jobs, for node_exporter.",
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Show the services, their addresses, whether a worker is online, and what waits in memory."""
    from trinity_sync.stack import local_stack

    settings = read_settings()
    if prometheus:
        with from_extra("metrics"):
            from trinity_sync.orchestration.metrics import WorkerMetrics
        WorkerMetrics().write_gauges(settings, prometheus)
        return
    report = local_stack.status(settings)
    print_object("stack", report, output, lambda: _print_stack(report))
    is_alone = report.services[0].state == "not used"
    down = {each.state for each in report.services} - {"running", "external", "not used", "idle"}
    if report.workers_online and report.services[2].state == "absent":  # that of another machine
        down.discard("absent")
    hang = [each for each in report.services if each.state == "unresponsive"]
    if savers := [str(each.pid) for each in hang if each.name == "saver"]:
        typer.echo(
            f"hint: the next save starts another saver after: kill -9 {' '.join(savers)}", err=True
        )
    if down & {"dead", "absent"} or len(hang) > len(savers):
        hint = "trinity-sync up starts what does not run or answer; trinity-sync logs says why"
        if is_alone:  # the saver
            hint = "start the training again, or run: trinity-sync retry ROOT STEP"
        typer.echo(f"hint: {hint}", err=True)
    if "unknown" in down:
        where = "in the container, or on the machine, of the stack, which alone sees its processes"
        typer.echo(f"hint: run it {where}", err=True)
    works = not (down or report.overrides or report.undeployed or report.paused or report.reason)
    works = works and (is_alone or bool(report.workers_online))
    raise typer.Exit(DONE if works else PROBLEM_FOUND)


@app.command("logs", "logs worker -f", "logs server -n 200", panel="Run the stack")
def logs(
    service: Annotated[
        Service | None, typer.Argument(help="Service (default: all).", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines.")] = 50,
) -> None:
    """Print the logs of the savers, and of the services that up started, also after down."""
    from trinity_sync.client.saver_control import LOG

    settings = read_settings()
    names = [service] if service else get_args(Service)
    paths = [settings.home / (LOG if name == "saver" else f"logs/{name}.log") for name in names]
    found = [str(path) for path in paths if follow or path.is_file()]  # -F also waits for a file
    if not found:
        raise with_hint(
            StackError(f"no log in {settings.home}"),
            "a save starts the saver, and trinity-sync up the stack",
        )
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *found]
    _exec(command, os.environ)


def _exec(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command.

    Raises:
        OSError: There is no such command.
    """
    sys.stdout.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and inherited by the command
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(command[0], command, environment)


@app.command("ui", "ui -o json", panel="Run the stack")
def ui(
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in a browser, if there is one.")
    ] = True,
    output: Output = "table",
) -> None:
    """Open the Prefect UI in a browser, or print its address and how to log in."""
    import webbrowser

    from trinity_sync.client.prefect_connection import hide_password
    from trinity_sync.stack import state_file

    settings = read_settings()
    state = state_file.read_state(settings.home)
    url = os.environ.get("PREFECT_API_URL") or (state.api_url if state else "")
    if not url:
        raise with_hint(PrefectApiError("no Prefect server is known"), "trinity-sync up")
    password = state.api_auth if state and url == state.api_url else ""
    report = UiReport(_ui_url(hide_password(url)), password or None)
    text = report.url
    if report.password:
        text += f"\npassword: {report.password}"
    print_object("ui", report, output, text)
    has_screen = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if browser and output == "table" and sys.stdout.isatty() and has_screen:
        webbrowser.open(report.url)


@app.command('eval "$(trinity-sync env)"', panel="Run the stack")
def env() -> None:
    """Print the environment variables with which a training uses the running stack."""
    from trinity_sync.stack import state_file

    state = state_file.read_state(read_settings().home)
    if state is None or not state.environment:
        typer.echo("false")  # the exit code of eval "$(...)"
        raise with_hint(PrefectApiError("no stack runs"), "trinity-sync up")
    for name, value in state.environment.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command(
    "trinity-sync deploy", "PREFECT_API_URL=http://prefect.internal/api trinity-sync deploy",
    panel="Run the stack", stack=True,
)  # fmt: skip
def deploy(config: ConfigFile = None, output: Output = "table") -> None:
    """Create or update the work pool, deployments and automations on a Prefect server."""
    from trinity_sync.orchestration import deploy
    from trinity_sync.settings import StackSettings

    stack = StackSettings()
    names = deploy.deploy(stack)
    rows = [DeploymentRow(name, stack.worker.pool) for name in names]
    print_rows("deployments", rows, output, "name pool")
    zone = deploy.find_time_zone(stack.maintenance)
    typer.echo(f"schedules are in time zone {zone}", err=True)


@app.command(
    "trinity-sync worker",
    "PREFECT_API_URL=http://prefect.internal/api "
    "TRINITY_SYNC_STACK__RAY__ADDRESS=10.0.0.4:6379 trinity-sync worker",
    panel="Run the stack", stack=True,
)  # fmt: skip
def worker(config: ConfigFile = None) -> None:
    """Run a flow worker in the foreground, for the services of the settings or of up."""
    from trinity_sync.settings import StackSettings
    from trinity_sync.stack import local_stack, services, state_file

    settings, stack = read_settings(), StackSettings()
    state = (state_file.read_state(settings.home) or services.StackState()).with_external(
        os.environ.get(local_stack.API_URL, ""), stack.ray.address
    )
    for variable, named in (
        (local_stack.API_URL, state.api_url),
        (local_stack.RAY_ADDRESS, state.ray_address),
    ):
        if not named:
            raise StackError(f"{variable} is not set and no stack runs. Run trinity-sync up first.")
    if not services.accepts_connections(
        state.ray_address
    ):  # Ray itself retries for minutes; a server may be away
        raise StackError(
            f"nothing answers at {local_stack.RAY_ADDRESS}={state.ray_address}. Start Ray there, "
            "or correct it; trinity-sync up starts the stack's own"
        )
    env = services.build_environment(settings, stack, state)
    services.make_home(settings.home)
    os.chdir(settings.home)  # python -m imports from it first, and it has no flows
    os.execve(sys.executable, [sys.executable, "-m", services.WORKER_MODULE], env)


def _print_ready(
    settings: "Settings", state: "StackState", report: "StackStatus", seconds: float
) -> None:
    from trinity_sync.settings import LOCAL_HOST
    from trinity_sync.stack import state_file

    asks = "; its password: trinity-sync ui" if state.api_auth else ""
    typer.echo(f"Prefect UI: {_ui_url(state.api_url)}{asks}")
    typer.echo(f"ready after {format_duration(seconds)}\n")
    _print_stack(report)
    typer.echo(
        '\nFor a training: trinity-sync run -- COMMAND, or in its shell: eval "$(trinity-sync env)"'
    )
    if state.server and state.host != LOCAL_HOST:
        invitation = settings.home / state_file.INVITATION
        typer.echo(f"On another machine, with a copy of {invitation}: trinity-sync join join.json")


def _print_stack(report: "StackStatus") -> None:
    shown = [each for each in report.services if each.state != "not used"]
    print_table(shown, "name status pid url")
    if len(shown) < len(report.services):
        typer.echo("no stack is used: savers commit all saves", err=True)
    if report.waiting:
        typer.echo("")
        print_table(report.waiting, "root steps since")
    for sentence in report.overrides:
        typer.echo(sentence, err=True)
    if report.changed:
        typer.echo("settings that the running stack does not have:", err=True)
        for change in report.changed:
            typer.echo(f"  {change}", err=True)
        typer.echo("hint: apply them with: trinity-sync restart", err=True)
    if report.reason:
        typer.echo(report.reason, err=True)
    if report.workers_online is not None:
        typer.echo(
            f"work pool {report.pool}: {report.workers_online} worker(s) online, "
            f"{report.waiting_runs} run(s) waiting",
            err=True,
        )
    if report.paused:
        typer.echo(f"paused: {', '.join(report.paused)}; resume it: trinity-sync ui", err=True)
    if report.undeployed:
        missing = ", ".join(report.undeployed)
        typer.echo(f"not deployed: {missing}; trinity-sync up deploys them", err=True)


def _ui_url(api_url: str) -> str:
    return api_url.rstrip("/").removesuffix("/api")
