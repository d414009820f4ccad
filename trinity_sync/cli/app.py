"""The Typer app: its common arguments, its errors and exit codes.

Commands import heavy packages (torch, Prefect, Ray) when they need them, so that help and ``ls``
are instant. An error is ``error: ...`` on stderr, with a ``hint: ...`` where one is known, or a
JSON object with ``-o json``.

ROOT is the first argument and STEP the second one of all commands. ROOT may be left out: then it is
``-C``, ``TRINITY_SYNC_ROOT``, the current folder if it is a root, or, for commands that only read,
the only job that this node knows.
"""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

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
from trinity_sync.layout import PRIVATE_FOLDER, parse_number, refuse_url, step_of_folder

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

_given_root: str | None = None
"""Value of ``-C`` or of its variable: a path or a URL."""


_SETTING = re.compile("[A-Za-z0-9_-]+=")
"""How a setting or metric begins, and no root: its value may be a URL or a path."""


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
        except BrokenPipeError:  # as of `ls | head`
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            code = NOT_DONE
        except (ClickException, TrinitySyncError, OSError) as error:
            print_error(error, as_json=as_json)
            code = get_exit_code(error)
        sys.exit(code if isinstance(code, int) else DONE)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options of all commands; the shell's completion also comes here."""
        global _given_root
        rest = super().parse_args(ctx, args)
        _given_root = ctx.params.get("root") or None
        return rest

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


class JobCommand(typer.core.TyperCommand):
    """A command whose first argument, ROOT, may be left out before the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the default root to the arguments if they have none."""
        positional = [each for each in self.params if each.param_type_name == "argument"]
        find_root: Any = positional[0].default if positional else None
        if callable(find_root) and positional[0].name == "root":
            if ctx.resilient_parsing:  # to complete a word: a line that lacks a root is no error
                ctx.default_map = {"root": ""}
                with suppress(TrinitySyncError, OSError):
                    args = self._add_root(ctx, args, positional, find_root)
            else:
                args = self._add_root(ctx, args, positional, find_root)
        return super().parse_args(ctx, args)

    def _add_root(
        self, ctx: Any, args: list[str], positional: list[Any], find_root: Callable[[], str]
    ) -> list[str]:
        found, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        values = [found.get(each.name or "") for each in positional]
        firsts = [value[0] if isinstance(value, tuple) and value else value for value in values]
        given = [value for value in firsts if isinstance(value, str)]
        required = sum(each.required for each in positional)
        # settings or metrics in the place of another argument
        fixed = sum(each.nargs != -1 for each in positional)
        if len(given) >= fixed < len(positional) and _SETTING.match(given[fixed - 1]):
            return [find_root(), *args]
        if given and _is_root_missing(given, required, len(positional), find_root):
            return [find_root(), *args]
        return args


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Return parameters, so that the help names no type of those that take no value."""
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return params


def _is_root_missing(
    given: list[str], required: int, most: int, find_root: Callable[[], str]
) -> bool:
    """Return whether the first of some arguments is not a root but a step.

    ``required`` counts the arguments other than the root, and ``most`` all that the command takes.
    """
    if len(given) == most or "://" in given[0] or os.sep in given[0]:
        return False
    if parse_number(given[0]) is None and Path(given[0]).is_dir():
        return False
    return len(given) == required or _is_step(given[0], find_root)


def _is_step(text: str, find_root: Callable[[], str]) -> bool:
    """Return whether an argument names a step of the default root, or a step by its number."""
    from trinity_sync.storage.pins import resolve_step

    if parse_number(text) is not None or text.startswith("latest"):
        return True
    try:
        resolve_step(find_root(), text)
    except TrinitySyncError:
        return False
    return True


class App(typer.Typer):
    """A Typer app whose commands are `JobCommand`."""

    def command(  # type: ignore[override]
        self, *commands: str, name: str | None = None, note: str = "", **options: Any
    ) -> Any:
        """Register a command, whose help ends with `examples` and is in the given ``panel``."""
        options |= {"epilog": examples(*commands, note=note), "cls": JobCommand}
        return super().command(name, rich_help_panel=options.pop("panel", None), **options)


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
    "ROOT may be left out in the folder of a job, with -C, or, to only read, if there is one job. "
    "A STEP is a number, a tag, latest, or latest~1 for the one before.\n\n"
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
        str | None,
        typer.Option(
            "--root",
            "-C",
            envvar=ROOT_VARIABLE,
            show_envvar=True,
            metavar="ROOT",
            autocompletion=complete_root,
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
    formats.color = color  # the group has read the root


def find_default_root() -> str:
    """Return the root, or its URL, of a command that names none.

    The job that this node knows is no default here: if the disk of another job is not mounted, it
    would be the wrong one.

    Raises:
        ConfigError: There is none.
    """
    return _find_given_root() or _refuse_to_guess("; a command that changes a job does not guess")


def guess_root() -> str:
    """Return the root, or its URL, of a command that only reads and names none.

    Raises:
        ConfigError: There is none, or several jobs are known, also such that do not exist now.
    """
    if found := _find_given_root():
        return found
    from trinity_sync.orchestration.job_registry import list_registered_roots

    known = list_registered_roots(read_settings())
    return str(known[0]) if len(known) == 1 and known[0].is_dir() else _refuse_to_guess()


def _find_given_root() -> str:
    """Return ``-C``, its variable, or the current folder if it is a root; otherwise "".

    Raises:
        ConfigError: The current folder is inside a root.
    """
    if _given_root is not None:
        return _given_root
    here = Path.cwd()
    if _is_root(here):
        return str(here)
    _refuse_inside(here, "the current folder")
    return ""


def _is_root(folder: Path) -> bool:
    return (folder / PRIVATE_FOLDER).is_dir() or any(folder.glob("global_step_*"))


def _refuse_inside(folder: Path, what: str) -> None:
    """Refuse a folder inside a root, such as that of a step.

    Raises:
        ConfigError: It is one; the hint names the root.
    """
    path = Path(os.path.abspath(folder))  # noqa: PTH100, also removes ..
    for each in (path, *path.parents):
        if each.name == PRIVATE_FOLDER or step_of_folder(each.name) is not None:
            raise with_hint(
                ConfigError(f"{what} is not the root of a job, but inside of one"),
                f"pass the root: {each.parent}",
            )


def _refuse_to_guess(why: str = "") -> NoReturn:
    from trinity_sync.orchestration.job_registry import list_registered_roots

    known = list_registered_roots(read_settings())
    text = "no ROOT: the current folder is not the root of a job"
    if known:
        names = ", ".join(f"{root}{'' if root.is_dir() else ' (missing)'}" for root in known)
        text += f", and this node knows {len(known)} job{'s' * (len(known) > 1)}: {names}{why}"
    raise with_hint(ConfigError(text), f"name the root, or pass -C ROOT, or set {ROOT_VARIABLE}")


def _describe_root(find_root: Callable[[], str], what: str) -> Any:
    """Return the argument ROOT of commands that call a function to find it if it is left out."""
    return typer.Argument(
        metavar="ROOT",
        default_factory=find_root,
        show_default=False,
        autocompletion=complete_root,
        help=what,
    )


_A_ROOT = "Root of the job, which holds the global_step_N folders."
_A_ROOT_OR_URL = "Root of the job, or the URL of its remote."

Root = Annotated[Path, _describe_root(find_default_root, _A_ROOT)]
"""Root of a command that changes something."""
RootToRead = Annotated[Path, _describe_root(guess_root, _A_ROOT)]
"""Root of a command that only reads."""
RootOrUrl = Annotated[str, _describe_root(find_default_root, _A_ROOT_OR_URL)]
"""Root or URL of a command that changes something."""
RootOrUrlToRead = Annotated[str, _describe_root(guess_root, _A_ROOT_OR_URL)]
"""Root or URL of a command that only reads."""

Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        autocompletion=complete_step,
        help="Step: its number, a tag, latest, or latest~1 for the one before.",
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


def require_existing(root: Path) -> Path:
    """Return the root of a job.

    Raises:
        ConfigError: It is not a folder, or is inside a root.
        FormatError: It is of another release.
    """
    from trinity_sync.snapshot.job_identity import read_identity

    refuse_url(root)
    if not root.is_dir():
        raise with_hint(
            ConfigError(f"{root} is not a folder"),
            "pass the job's root, e.g. trinity-sync ls ckpts",
        )
    if not _is_root(root):
        _refuse_inside(root, str(root))
    read_identity(root)  # which refuses a root of another release
    return root


def resolve_step_argument(root: Path, step: str) -> int:
    """Return the number of a step, given by number or tag, as ``latest`` or as ``latest~N``.

    Raises:
        ConfigError: The root is not a folder, or the job has no such tag.
        CommitError: ``latest`` is asked for, and no checkpoint is committed.
    """
    from trinity_sync.storage.pins import resolve_step

    return resolve_step(require_existing(root), step)


def print_error(error: BaseException, *, as_json: bool) -> None:
    """Print an error and its hint to stderr."""
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
