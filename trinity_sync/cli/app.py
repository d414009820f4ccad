"""The Typer app: its common arguments, its errors and exit codes.

Commands import heavy packages (torch, Prefect, Ray) when they need them, so that help and ``ls``
are instant. An error is ``error: ...`` on stderr, with a ``hint: ...`` where one is known, or a
JSON object with ``-o json``.

ROOT is the first argument and STEP the second one of all commands.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from trinity_sync.cli import output as formats
from trinity_sync.cli.completion import complete_root, complete_step
from trinity_sync.cli.output import Color
from trinity_sync.errors import (
    ConfigError,
    CorruptedCopyError,
    MissingPackageError,
    PrefectApiError,
    RemoteError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import UNWRITABLE, list_paths
from trinity_sync.layout import PRIVATE_FOLDER, check_root, refuse_url, step_of_folder
from trinity_sync.stack import list_missing_packages

if TYPE_CHECKING:
    from trinity_sync.settings import Settings

DONE, NOT_DONE, USAGE, PROBLEM_FOUND, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit codes of all commands: done; could not be done; wrong usage or settings; done, and a problem
was found; the Prefect server or the remote cannot be reached; Ctrl-C."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]
E = TypeVar("E", bound=TrinitySyncError)


def with_hint(error: E, hint: str) -> E:
    """Return an error with the hint that the command prints below it."""
    error.hint = hint
    return error


def get_exit_code(error: BaseException) -> int:
    """Return the exit code of the command for an error."""
    if isinstance(error, (ConfigError, UsageError)):
        return USAGE
    if isinstance(error, CorruptedCopyError):
        return NOT_DONE
    return UNREACHABLE if isinstance(error, (PrefectApiError, RemoteError)) else NOT_DONE


class CommandGroup(typer.core.TyperGroup):
    """Prints errors without tracebacks, and exits with the code of the error."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run the command, and exit."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = _wants_json(words)
        try:
            code = super().main(args=words, standalone_mode=False, **extra)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except typer.Abort as error:
            typer.echo("error: aborted", err=True)
            interrupted = isinstance(error.__context__, KeyboardInterrupt)  # at a question
            code = INTERRUPTED if interrupted else NOT_DONE
        except (ClickException, TrinitySyncError, OSError) as error:
            print_error(error, as_json=as_json)
            code = get_exit_code(error)
        sys.exit(code if isinstance(code, int) else DONE)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader such as ``head`` may close the pipe, which is no error."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # Click would exit with 1
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            return DONE

    def _main_shell_completion(self, *args: Any, **options: Any) -> None:
        """Complete a word, and never print an error between the user's words."""
        try:
            super()._main_shell_completion(*args, **options)
        except (TrinitySyncError, OSError):
            sys.exit(NOT_DONE)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; those that install the completion are not in the help."""
        found = _without_flag_types(super().get_params(ctx))
        for each in found:
            if each.name in ("install_completion", "show_completion"):
                each.hidden = True
        return found


class Command(typer.core.TyperCommand):
    """A command, whose help names no type of an option that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_flag_types(super().get_params(ctx))


class StackCommand(Command):
    """A command that needs the packages of the stack."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            MissingPackageError: This environment has the client only.
        """
        if missing := list_missing_packages():
            raise with_hint(
                MissingPackageError(
                    f"{ctx.command_path} needs the stack, and {sys.prefix} has the client only (it "
                    f"lacks {', '.join(missing)})"
                ),
                "install the stack into an environment of its own: uv tool install "
                '"trinity-sync[stack]", or pip install "trinity-sync[stack]" in a new virtual '
                "environment",
            )
        return super().invoke(ctx)


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Return parameters, so that the help names no type of those that take no value."""
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return params


class App(typer.Typer):
    """A Typer app whose commands are `Command`."""

    def command(  # type: ignore[override]
        self,
        *commands: str,
        name: str | None = None,
        note: str = "",
        panel: str | None = None,
        stack: bool = False,
        **options: Any,
    ) -> Any:
        """Register a command, whose help ends with `examples` and is in the given ``panel``.

        With ``stack`` it is refused where the client is installed alone.
        """
        options |= {"epilog": examples(*commands, note=note), "rich_help_panel": panel}
        return super().command(name, cls=StackCommand if stack else Command, **options)


def examples(*commands: str, note: str = "") -> str:
    """Return the end of a command's help: a note, and commands with or without ``trinity-sync``."""
    full = [each if "trinity-sync" in each else f"trinity-sync {each}" for each in commands]
    lines = "\n".join(f"[bold]  {command}[/]" for command in full)
    return "\n\n".join([*([note] if note else []), f"Examples:\n{lines}"])


app = App(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checkpoints for RL post-training: run the stack, inspect and manage checkpoints.\n\n"
    "ROOT is the folder of a job. A STEP is a number, a tag, latest, latest~1 for the one before, "
    "healthy, or best=val_loss:min.\n\n"
    "Settings of the stack are in trinity_sync.toml (trinity-sync config show); TRINITY_SYNC_HOME "
    "is its folder, and PREFECT_API_URL names an external server.",
    epilog=examples(
        "up", "run -- torchrun train.py", "ls ckpts", "show ckpts latest", "down",
        note="Exit codes: 0 done; 1 could not be done; 2 usage or settings; 3 done, and a problem "
        "was found; 4 server or remote unreachable.\n\nCompletion of the shell: "
        "trinity-sync --install-completion",
    ),
)  # fmt: skip


PACKAGES = ("prefect", "ray", "torch", "verl", "transformers", "lightning")
"""Packages whose versions decide how trinity-sync works."""


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from trinity_sync.layout import MANIFEST_FORMAT, ROOT_FORMAT, RUN_FORMAT, SPOOL_FORMAT

    def find(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    python = ".".join(map(str, sys.version_info[:3]))
    typer.echo(f"{find('trinity-sync')} of Python {python}, {sys.executable}")
    typer.echo(", ".join(map(find, PACKAGES)))
    typer.echo(
        f"record formats: root {ROOT_FORMAT}, spool {SPOOL_FORMAT}, manifest {MANIFEST_FORMAT}, "
        f"run {RUN_FORMAT}"
    )
    raise typer.Exit


@app.callback()
def set_options(
    color: Annotated[
        Color, typer.Option(help="Colours of status words; auto heeds NO_COLOR.")
    ] = "auto",
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions, also of Python and of packages, and the record formats.",
        ),
    ] = False,
) -> None:
    """Set the options of all commands."""
    formats.color = color
    if color == "never":
        os.environ["NO_COLOR"] = "1"  # for the help, which rich prints


def is_root(folder: Path) -> bool:
    """Return whether a folder has steps or records of a job."""
    return (folder / PRIVATE_FOLDER).is_dir() or bool(list_paths(folder, "global_step_*"))


def _refuse_inside(folder: Path) -> None:
    """Refuse a folder inside a root, such as that of a step.

    Raises:
        ConfigError: It is one; the hint names the root.
    """
    path = Path(os.path.abspath(folder))  # noqa: PTH100, also removes ..
    for each in (path, *path.parents):
        if each.name == PRIVATE_FOLDER or step_of_folder(each.name) is not None:
            raise with_hint(
                ConfigError(f"{folder} is not the root of a job, but inside of one"),
                f"pass the root: {each.parent}",
            )


def _require_text(text: str) -> str:
    if not text:
        refuse_url(text)  # a Path would make it the folder that the command is run in
    return text


Root = Annotated[
    Path,
    typer.Argument(
        parser=lambda text: Path(_require_text(text)),
        metavar="ROOT",
        autocompletion=complete_root,
        help="Root of the job, which holds the global_step_N folders.",
    ),
]
RootOrUrl = Annotated[
    str,
    typer.Argument(
        callback=_require_text,
        metavar="ROOT",
        autocompletion=complete_root,
        help="Root of the job, or the URL of its remote.",
    ),
]

Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        autocompletion=complete_step,
        help="Step: its number, a tag, latest, latest~1 for the one before, healthy: the newest "
        "without NaN or infinite values, or best=val_loss:min by a metric.",
    ),
]
Role = Annotated[str, typer.Option(help="Role, e.g. actor.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone; ``question`` has no question mark.

    Raises:
        typer.Abort: The answer is no.
        ConfigError: There is no terminal to ask on.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise with_hint(
            ConfigError(f"not confirmed: {question}"), "there is no terminal to ask on; pass --yes"
        )
    typer.confirm(f"{question}?", abort=True, err=True)


def read_settings() -> "Settings":
    """Read the settings of the environment.

    Raises:
        ConfigError: A value is invalid.
    """
    from trinity_sync.settings import Settings

    return Settings()


def update_catalog(root: Path, steps: Iterable[int]) -> None:
    """Update the catalog after a change of a job's steps; a client alone has none."""
    if list_missing_packages():
        return
    from trinity_sync.catalog import try_mirror

    try_mirror(read_settings(), root, steps)


def require_existing(root: Path) -> Path:
    """Return the root of a job.

    Raises:
        ConfigError: It is not a folder, or no root, such as a folder inside of one.
        FormatError: It is of another release.
    """
    from trinity_sync.snapshot.identity import read_identity

    refuse_url(root)
    wrong = "" if root.is_dir() else "is not a folder"
    if not wrong and not is_root(root):
        _refuse_inside(root)
        check_root(root)  # also behind a link
        wrong = "is no root of a job: it has neither steps nor records"
    if wrong:
        hint = "pass the job's root, e.g. trinity-sync ls ckpts"
        raise with_hint(ConfigError(f"{root} {wrong}"), hint)
    read_identity(root)  # which refuses a root of another release
    return root


def resolve_step_argument(root: Path, step: str) -> int:
    """Return the number of a step in any form of `resolve_step`.

    Raises:
        ConfigError, CommitError: as `resolve_step`, or the root is none of a job.
    """
    from trinity_sync.storage.steps_in_use import resolve_step

    return resolve_step(require_existing(root), step)


def print_error(error: BaseException, *, as_json: bool) -> None:
    """Print an error and its hint to stderr."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        what = f"{error.filename or 'a file'} cannot be opened or written"
        error = with_hint(
            ConfigError(f"{what}: {error.strerror}"),
            "run the command as a user who may write there, or free space, change the owner or "
            "mode of the root, or mount it for writing",
        )
    kind = type(error).__name__
    if isinstance(error, ClickException):
        message = error.format_message().replace("Value error, ", "")  # type: ignore[attr-defined]
        ctx = getattr(error, "ctx", None)
        if kind == "NoArgsIsHelpError":
            typer.echo(message, err=True)
            return
        hint = f"see {ctx.command_path} --help" if ctx else ""
        kind = "UsageError"
    else:
        message, hint = str(error), getattr(error, "hint", "")
    if as_json:
        body = {"type": kind, "message": message, "hint": hint or None}
        typer.echo(json.dumps({"error": body}), err=True)
        return
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)


def _wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, even if it cannot be parsed."""
    own = list(itertools.takewhile(lambda word: word != "--", words))
    pairs = {f"{first}={second}" for first, second in itertools.pairwise(own)}
    return not {"-ojson", "-o=json", "--output=json"}.isdisjoint({*own, *pairs})
