"""Commands for settings: config show, init."""

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_sync.cli.app import App, app, examples, read_settings, with_hint
from trinity_sync.cli.output import Output, print_rows
from trinity_sync.cli.rows import SettingRow
from trinity_sync.errors import ConfigError

WIDTH = 88
"""Width of the comments of a new file."""


def _use_file(path: Path | None) -> None:
    """Let this process and those that it starts read the settings of the stack from a file."""
    if path:
        os.environ["TRINITY_SYNC_CONFIG"] = str(path.absolute())


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_use_file,
        metavar="FILE",
        help="File with the settings of the stack; by default TRINITY_SYNC_CONFIG, or "
        "trinity_sync.toml in ~/.config/trinity_sync or /etc/trinity_sync.",
    ),
]
"""Option of the commands that read the settings of a stack."""

config = App(
    no_args_is_help=True,
    help="Show and write the settings of the stack.",
    epilog=examples("config show", "config init ~/.config/trinity_sync/trinity_sync.toml"),
)
app.add_typer(config, name="config", rich_help_panel="Run the stack")


@config.command("config show", "config show --config trinity_sync.toml", "config show -o json")
def show(file: ConfigFile = None, output: Output = "table") -> None:
    """Show each setting: its value, where that is from, and the default.

    An error names each problem of the file and the environment, and a valid value.
    """
    print_rows("settings", list_settings(), output, "name value source")


@config.command("config init ~/.config/trinity_sync/trinity_sync.toml")
def init(
    file: Annotated[
        Path | None, typer.Argument(help="The new file; by default it is printed.")
    ] = None,
) -> None:
    """Write a file with all settings of the stack, their meaning and defaults, as comments."""
    from trinity_sync.fs.atomic import replace_file

    text = format_new_file()
    if file is None:
        typer.echo(text, nl=False)
        return
    if file.exists():
        raise with_hint(ConfigError(f"{file} exists"), "remove it first, or choose another path")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text, mode=0o600)  # the catalog's password may be in it
    typer.echo(f"wrote {file}; edit it, then: trinity-sync config show --config {file}")


def list_settings() -> list[SettingRow]:
    """Return all settings of this process and of the stack.

    Raises:
        ConfigError: A setting is invalid.
    """
    from trinity_sync.settings import (
        PREFIX,
        StackSettings,
        find_config_file,
        iter_stack_fields,
        read_config_file,
        stack_variable,
    )
    from trinity_sync.settings.values import show_value

    settings, stack = read_settings(), StackSettings()
    path, in_file = find_config_file(), read_config_file()
    values, defaults = _dump(settings), _dump(type(settings).model_construct())
    rows = [
        SettingRow(
            variable,
            show_value(values[name]),
            show_value(defaults[name]),
            variable if os.environ.get(variable) else "default",
        )
        for name in type(settings).model_fields
        for variable in [f"{PREFIX}{name}".upper()]
    ]
    values, defaults = _dump(stack), _dump(StackSettings.model_construct())
    for section, key, _ in iter_stack_fields():
        variable, source = stack_variable(section, key), "default"
        if os.environ.get(variable):
            source = variable
        elif key in in_file.get(section, {}):
            source = str(path)
        value, default = show_value(values[section][key]), show_value(defaults[section][key])
        rows.append(SettingRow(f"{section}.{key}", value, default, source))
    return rows


def format_new_file() -> str:
    """Return a file with all settings of the stack as comments, which sets none of them."""
    from trinity_sync.settings import CONFIG_FILE, StackSettings, stack_variable

    defaults = StackSettings.model_construct()
    example = stack_variable("server", "port")
    lines = [
        f"# {CONFIG_FILE}: settings of a trinity_sync stack. Values in comments are the defaults.",
        f"# A variable such as {example} goes before this file.",
        "# A running stack applies changes after: trinity-sync restart",
    ]
    for section in StackSettings.model_fields:
        values = getattr(defaults, section)
        lines += ["", *_comment((type(values).__doc__ or "").partition("\n\n")[0]), f"[{section}]"]
        for key, field in type(values).model_fields.items():
            lines += ["", *_comment(field.description or "")]
            if field.examples:
                lines.append(f"# For example: {key} = {_to_toml(field.examples[0])}")
            lines.append(f"#{key} = {_to_toml(getattr(values, key), _dump(values)[key])}")
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    plain = re.sub(r"``?", "", " ".join(text.split()))
    return [f"# {line}" for line in textwrap.wrap(plain, WIDTH)]


def _to_toml(value: Any, dumped: Any = None) -> str:
    """Return a value in TOML; ``dumped`` is its JSON, which is the same for all but paths."""
    if isinstance(value, tuple):
        return json.dumps([str(each) for each in value])
    return json.dumps(value if dumped is None else dumped)


def _dump(settings: Any) -> Any:
    return settings.model_dump(mode="json")
