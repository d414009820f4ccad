"""The ``trinity-sync`` command, of the stack's environment and of one with the client only.

Both environments have a script of this name. The client's runs the commands that need files only,
and executes the stack's script instead if that is on ``PATH``: it also reads the catalog and asks
Prefect. This module imports nothing that takes long.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from trinity_sync.stack import list_missing_packages

TRIED = "TRINITY_SYNC_TRIED"
"""Environment variable with the scripts that were tried, in order; empty if none has a stack."""


def main() -> None:
    """Run the command, or that of the stack's environment if this one has the client only."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # before a trainer's PYTHONPATH
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # it is closed, as by >&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    tried = os.environ.pop(TRIED, None)
    script = Path(sys.argv[0]).resolve()
    if tried != "" and script.name == "trinity-sync" and list_missing_packages():
        _run_other_script([*tried.split(os.pathsep)] if tried else [str(script)])
    try:
        from trinity_sync.cli.commands import app
    except KeyboardInterrupt:  # the imports take a second, and nothing has started yet
        sys.exit(130)
    app(prog_name="trinity-sync")


def _run_other_script(tried: list[str]) -> None:
    """Execute the next ``trinity-sync`` on ``PATH``, or the first that was tried if none is left.

    Return if there is no other: in an environment with the client only.
    """
    for folder in os.get_exec_path():
        script = Path(folder).absolute() / "trinity-sync"
        if str(script.resolve()) not in tried and script.is_file():
            tried.append(str(script.resolve()))
            _execute(script, os.pathsep.join(tried))
    if len(tried) > 1:
        _execute(Path(tried[0]), "")


def _execute(script: Path, tried: str) -> None:
    """Replace this process by a script; return if it cannot be run, which a shell skips as well."""
    with suppress(OSError):
        os.execve(script, [str(script), *sys.argv[1:]], {**os.environ, TRIED: tried})
