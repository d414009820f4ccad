"""What the command says of itself."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from trinity_sync.cli.commands import app
from trinity_sync.storage.job_settings import NAMES

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


def test_ctrl_c_during_the_imports_is_no_traceback() -> None:
    script = """
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "trinity_sync.cli.commands":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from trinity_sync.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_help_of_jobs_set_names_each_setting_of_a_job() -> None:
    shown = CliRunner().invoke(app, ["jobs", "set", "--help"], env={"COLUMNS": "200"}).stdout
    assert [name for name in NAMES if name not in shown] == []
