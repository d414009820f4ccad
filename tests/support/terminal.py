"""A command whose output is a terminal."""

import os
import pty
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def run_at_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    look: Callable[[bytes, "subprocess.Popen[bytes]", int], None] = lambda *_: None,
) -> tuple[int, str]:
    """Return the exit code of a command, and what its terminal showed.

    Args:
        look: called with what was shown, the process and the terminal, whenever that is more.
    """
    ours, its = pty.openpty()
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        shown = b""
        try:
            while some := os.read(ours, 65536):
                shown += some
                look(shown, process, ours)
        except OSError:  # the other end is closed: the command has ended
            pass
        finally:
            os.close(ours)
    return process.returncode, shown.decode(errors="replace").replace("\r\n", "\n")
