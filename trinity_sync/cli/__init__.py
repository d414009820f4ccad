"""The ``trinity-sync`` command of the stack, and of an environment with the client only.

Both environments have a script of this name. The client's cannot run the commands, so if it is
first on ``PATH``, it executes the stack's instead. This module imports nothing that a client lacks.
"""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

STACK_PACKAGES = ("alembic", "prefect", "ray", "rich", "sqlalchemy", "typer")
"""Packages of the ``stack`` extra; an environment without one of them has the client only."""
TRIED = "TRINITY_SYNC_TRIED"
"""Environment variable with the scripts that were already tried."""


def main() -> None:
    """Run the command, or that of the stack's environment if this one has the client only."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # before a trainer's PYTHONPATH
    tried = os.environ.pop(TRIED, "")
    if missing := [name for name in STACK_PACKAGES if find_spec(name) is None]:
        _run_other_script(missing, tried)
    try:
        from trinity_sync.cli.commands import app
    except KeyboardInterrupt:  # the imports take a second, and nothing has started yet
        sys.exit(130)
    app(prog_name="trinity-sync")


def _run_other_script(missing: list[str], tried: str) -> None:
    """Execute another ``trinity-sync`` on ``PATH``; exit with an error if there is none."""
    seen = {*tried.split(os.pathsep), str(Path(sys.argv[0]).resolve())}
    for folder in os.get_exec_path():
        script = Path(folder).absolute() / "trinity-sync"
        name = str(script.resolve())
        if name not in seen and script.is_file():
            seen.add(name)
            with suppress(OSError):  # skip scripts that cannot be run, as a shell does
                env = {**os.environ, TRIED: os.pathsep.join(sorted(seen))}
                os.execve(script, [str(script), *sys.argv[1:]], env)
    sys.exit(
        f"error: {sys.prefix} has the client only (it lacks {', '.join(missing)})\nhint: install "
        'the stack into an environment of its own: uv tool install "trinity-sync[stack]", or '
        'pip install "trinity-sync[stack]" in a new virtual environment'
    )
