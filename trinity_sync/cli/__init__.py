"""The ``trinity-sync`` command: of the stack, and of an environment that has the client alone.

Both environments have a script of this name, and whichever comes first on ``PATH`` is found first.
So the client's, which has nothing to run, gives way to the stack's. Nothing is imported here that
a client lacks.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

STACK_PACKAGES = ("alembic", "prefect", "prefect_ray", "ray", "rich", "sqlalchemy", "typer")
"""What the ``stack`` extra brings; an environment that lacks one of them has the client alone."""


def main() -> None:
    """Run the command, or that of the stack's environment where this one has the client alone."""
    if missing := [name for name in STACK_PACKAGES if find_spec(name) is None]:
        _run_other_script(missing)
    from trinity_sync.cli.commands import app

    app(prog_name="trinity-sync")


def _run_other_script(missing: list[str]) -> None:
    """Become the next ``trinity-sync`` on ``PATH``; end with a sentence if there is none."""
    own = Path(sys.argv[0]).absolute()
    folders = [Path(folder) for folder in os.get_exec_path()]
    if own.parent in folders:  # those before it were passed over when it was found
        folders = folders[folders.index(own.parent) + 1 :]
    for folder in folders:
        script = folder / "trinity-sync"
        if script.resolve() != own.resolve() and os.access(script, os.X_OK):
            os.execv(script, [str(script), *sys.argv[1:]])
    sys.exit(
        f"trinity-sync: {sys.prefix} has the client alone (it lacks {', '.join(missing)}). Install "
        'the stack into an environment of its own: uv tool install "trinity-sync[stack]", or '
        'pip install "trinity-sync[stack]" in a new virtual environment'
    )
