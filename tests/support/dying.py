"""Work that dies by SIGKILL right before it changes a name on disk."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
"""Audit events of what a crash can fall between."""


def in_a_process(body: Callable[[], object], notes: Path, *, die_before: int | None = None) -> int:
    """Run ``body`` in a child that dies before it changes names for that many-th time.

    Args:
        body: does not return anything that is needed.
        notes: a folder elsewhere.
        die_before: 1 for the first change; None lets the child live.

    Returns:
        How often it changed names; ``die_before`` if it died.
    """
    counted = notes / "changes"
    counted.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: object) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == die_before:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            body()
            counted.write_text(json.dumps(seen))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert die_before is not None
        return die_before
    return int(counted.read_text())
