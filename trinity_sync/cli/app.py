"""The Typer app: its common arguments, its errors and exit codes.

Commands import heavy packages (torch, Prefect, Ray) when they need them, so that help and ``ls``
are instant. An error is ``error: ...`` on stderr, with a ``hint: ...`` where one is known, or a
JSON object with ``-o json``.

ROOT is the first argument and STEP the second one of all commands. ROOT may be left out: then it is
``-C``, ``TRINITY_SYNC_ROOT``, the current folder if it is a root, or the only job that this node
knows.
"""

import itertools
import json
import os
import sys
from collections.abc import Sequence
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
    PrefectApiError,
    RemoteError,
    TrinitySyncError,
)
from trinity_sync.layout import PRIVATE_FOLDER, parse_number, refuse_url

if TYPE_CHECKING:
    from trinity_sync.settings import Settings

DONE, NOT_DONE, USAGE, PROBLEM_FOUND, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit codes of all commands: done; could not be done; wrong usage or settings; done, and a problem
was found; the Prefect server or the remote cannot be reached; Ctrl-C."""

ROOT_VARIABLE = "TRINITY_SYNC_ROOT"
"""Environment variable with the root of commands that name none."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]
E = TypeVar("E", bound=TrinitySyncError)

_given_root: Path | None = None
"""Value of ``-C``."""


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
        except typer.Abort:
            typer.echo("error: aborted", err=True)
            code = NOT_DONE
        except BrokenPipeError:  # as of `ls | head`
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            code = NOT_DONE
        except (ClickException, TrinitySyncError, OSError) as error:
            print_error(error, as_json=as_json)
            code = get_exit_code(error)
        sys.exit(code if isinstance(code, int) else DONE)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; those that install the completion are not in the help."""
        found = _without_flag_types(super().get_params(ctx))
        for each in found:
            if each.name in ("install_completion", "show_completion"):
                each.hidden = True
        return found


class JobCommand(typer.core.TyperCommand):
    """A command whose first argument, ROOT, may be left out before the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the default root to the arguments if they have none."""
        positional = [each for each in self.params if each.param_type_name == "argument"]
        if positional and positional[0].name == "root" and not positional[0].required:
            found, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            values = [found.get(each.name or "") for each in positional]
            firsts = [value[0] if isinstance(value, tuple) and value else value for value in values]
            given = [value for value in firsts if isinstance(value, str)]
            required = sum(each.required for each in positional)
            if given and _is_root_missing(given, required, len(positional)):
                args = [str(find_default_root()), *args]
        return super().parse_args(ctx, args)


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Return parameters, so that the help names no type of those that take no value."""
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return params


def _is_root_missing(given: list[str], required: int, most: int) -> bool:
    """Return whether the first of some arguments is not a root but a step.

    Args:
        given: The arguments.
        required: How many arguments other than the root are required.
        most: How many arguments the command takes.
    """
    if "=" in given[0] and not Path(given[0]).exists():  # a setting
        return True
    if len(given) == most or "://" in given[0] or os.sep in given[0]:
        return False
    if parse_number(given[0]) is None and Path(given[0]).is_dir():
        return False
    return len(given) == required or _is_step(given[0])


def _is_step(text: str) -> bool:
    """Return whether an argument names a step of the default root, or a step by its number."""
    from trinity_sync.storage.pins import resolve_step

    if parse_number(text) is not None or text.startswith("latest"):
        return True
    try:
        resolve_step(find_default_root(), text)
    except TrinitySyncError:
        return False
    return True


class App(typer.Typer):
    """A Typer app whose commands are `JobCommand`."""

    def command(self, *args: Any, **options: Any) -> Any:
        """Register a command."""
        return super().command(*args, **{"cls": JobCommand, **options})


def examples(*commands: str, note: str = "") -> str:
    """Return the end of a command's help: a note, and examples that can be copied.

    Args:
        *commands: Commands without the name of the program.
        note: Text before them.
    """
    lines = "\n".join(f"[bold]  trinity-sync {command}[/]" for command in commands)
    return "\n\n".join([*([note] if note else []), f"Examples:\n{lines}"])


app = App(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checkpoints for RL post-training: run the stack, inspect and manage checkpoints.\n\n"
    "ROOT may be left out in the folder of a job, with -C, or if there is one job. A STEP is a "
    "number, a tag, latest, or latest~1 for the one before.\n\n"
    "Settings of the stack are in trinity_sync.toml (trinity-sync config show); TRINITY_SYNC_HOME "
    "is its folder, and PREFECT_API_URL names an external server.",
    epilog=examples(
        "up", "run -- torchrun train.py", "ls ckpts", "show ckpts latest", "down",
        note="Exit codes: 0 done; 1 could not be done; 2 usage or settings; 3 done, and a problem "
        "was found; 4 server or remote unreachable.\n\nCompletion of the shell: "
        "trinity-sync --install-completion",
    ),
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from trinity_sync import __version__

        typer.echo(f"trinity-sync {__version__}")
        raise typer.Exit


@app.callback()
def set_options(
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            "-C",
            envvar=ROOT_VARIABLE,
            show_envvar=True,
            help="Root of the job, for commands that name none.",
        ),
    ] = None,
    color: Annotated[
        Color, typer.Option(help="Colours of status words; auto heeds NO_COLOR.")
    ] = "auto",
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the version; see also the command version.",
        ),
    ] = False,
) -> None:
    """Set the options of all commands."""
    global _given_root
    _given_root, formats.color = root, color


def find_default_root() -> Path:
    """Return the root of a command that names none.

    Raises:
        ConfigError: There is none, or several jobs are known.
    """
    if _given_root is not None:
        return _given_root
    here = Path.cwd()
    if (here / PRIVATE_FOLDER).is_dir() or any(here.glob("global_step_*")):
        return here
    from trinity_sync.orchestration.job_registry import list_known_roots

    known = list_known_roots(read_settings())
    if len(known) == 1:
        return known[0]
    names = f"this node knows {len(known)} jobs: {', '.join(map(str, known))}"
    raise with_hint(
        ConfigError("no ROOT: the current folder is not the root of a job, and " + names)
        if known
        else ConfigError("no ROOT: the current folder is not the root of a job"),
        f"name the root, or pass -C ROOT, or set {ROOT_VARIABLE}",
    )


Root = Annotated[
    Path,
    typer.Argument(
        metavar="ROOT",
        default_factory=find_default_root,
        show_default=False,
        autocompletion=complete_root,
        help="Root of the job, which holds the global_step_N folders.",
    ),
]
RootOrUrl = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        default_factory=lambda: str(find_default_root()),
        show_default=False,
        autocompletion=complete_root,
        help="Root of the job, or the URL of its remote.",
    ),
]
Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        autocompletion=complete_step,
        help="Step: its number, a tag, latest, or latest~1 for the one before.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone.

    Args:
        question: What will be done, without a question mark.
        yes: Value of ``--yes``: do not ask.

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


def require_existing(root: Path) -> Path:
    """Return the root of a job.

    Raises:
        ConfigError: It is not a folder.
    """
    refuse_url(root)
    if not root.is_dir():
        raise with_hint(
            ConfigError(f"{root} is not a folder"),
            "pass the job's root, e.g. trinity-sync ls ckpts",
        )
    return root


def resolve_step_argument(root: Path, step: str) -> int:
    """Return the number of a step.

    Args:
        root: Root of the job.
        step: Number or tag of the step, ``latest`` or ``latest~N``.

    Raises:
        ConfigError: The root is not a folder, or the job has no such tag.
        CommitError: ``latest`` is asked for, and no checkpoint is committed.
    """
    from trinity_sync.storage.pins import resolve_step

    return resolve_step(require_existing(root), step)


def print_error(error: BaseException, *, as_json: bool) -> None:
    """Print an error and its hint to stderr.

    Args:
        error: The error.
        as_json: Whether to print a JSON object.
    """
    kind = type(error).__name__
    if isinstance(error, ClickException):
        message = error.format_message()  # type: ignore[attr-defined]
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
    formats_ = ("json", "jsonl")
    joined = [f"{each}{name}" for each in ("-o", "--output=", "-o=") for name in formats_]
    if "--" in words:
        words = words[: words.index("--")]
    pairs = itertools.pairwise(words)
    return any(a in ("-o", "--output") and b in formats_ for a, b in pairs) or any(
        word in joined for word in words
    )
