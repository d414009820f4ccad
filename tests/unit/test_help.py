"""What the command says of itself."""

import pytest
import typer
from typer.testing import CliRunner

from trinity_sync.cli.commands import app

GROUP = typer.main.get_group(app)
COMMANDS = [
    f"{name} {inner}".strip()
    for name, command in GROUP.commands.items()
    for inner in getattr(command, "commands", [""])
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "Example" in done.stdout
    assert f"trinity-sync {command}" in done.stdout
