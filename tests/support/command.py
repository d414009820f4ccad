"""The command in this process."""

from collections.abc import Mapping

from click.testing import Result
from typer.testing import CliRunner

from trinity_sync.cli.commands import app


def invoke(*arguments: object, env: Mapping[str, str] | None = None) -> Result:
    """Run the command without a terminal, with ``env`` added to this environment."""
    return CliRunner().invoke(
        app, [str(each) for each in arguments], env={"COLUMNS": "200", **(env or {})}
    )
