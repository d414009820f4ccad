"""The command in this process."""

import logging
from collections.abc import Mapping

from click.testing import Result
from typer.testing import CliRunner

from trinity_sync.cli.commands import app


def invoke(*arguments: object, env: Mapping[str, str] | None = None) -> Result:
    """Run the command without a terminal, with ``env`` added to this environment."""
    before = [*logging.root.handlers]
    try:
        return CliRunner().invoke(
            app, [str(each) for each in arguments], env={"COLUMNS": "200", **(env or {})}
        )
    finally:  # Prefect's, which may be imported meanwhile, writes to this call's stderr
        logging.root.handlers[:] = before
