"""The ``trinity-sync`` command: of the stack, and of an environment that has the client alone.

Both environments have a script of this name, and whichever comes first on ``PATH`` is found first.
So the client's, which has nothing to run, gives way to the stack's. Nothing is imported here that
a client lacks.
"""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

STACK_PACKAGES = ("alembic", "prefect", "prefect_ray", "ray", "rich", "sqlalchemy", "typer")
"""What the ``stack`` extra brings; an environment that lacks one of them has the client alone."""
PASSED = "TRINITY_SYNC_PASSED"
"""Variable of the next script: those that were asked before it, so that none is asked twice."""


def main() -> None:
    """Run the command, or that of the stack's environment where this one has the client alone."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # before what PYTHONPATH has for trainers
    passed = os.environ.pop(PASSED, "")
    if missing := [name for name in STACK_PACKAGES if find_spec(name) is None]:
        _run_other_script(missing, passed)
    from trinity_sync.cli.commands import app

    app(prog_name="trinity-sync")


def _run_other_script(missing: list[str], passed: str) -> None:
    """Become another ``trinity-sync`` of ``PATH``; end with a sentence if there is none."""
    seen = {*passed.split(os.pathsep), str(Path(sys.argv[0]).resolve())}
    for folder in os.get_exec_path():
        script = Path(folder).absolute() / "trinity-sync"
        name = str(script.resolve())
        if name not in seen and script.is_file():
            seen.add(name)
            with suppress(OSError):  # as a shell, pass over what cannot be run
                env = {**os.environ, PASSED: os.pathsep.join(sorted(seen))}
                os.execve(script, [str(script), *sys.argv[1:]], env)
    sys.exit(
        f"trinity-sync: {sys.prefix} has the client alone (it lacks {', '.join(missing)}). Install "
        'the stack into an environment of its own: uv tool install "trinity-sync[stack]", or '
        'pip install "trinity-sync[stack]" in a new virtual environment'
    )
