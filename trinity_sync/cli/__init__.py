"""The ``trinity-sync`` command; a module for each group of its commands."""

from trinity_sync.cli import (
    care,
    compare,
    copies,
    doctor,
    history,
    report,
    retention,
    stack,
    steps,
)
from trinity_sync.cli.frame import app

__all__ = [
    "app",
    "care",
    "compare",
    "copies",
    "doctor",
    "history",
    "report",
    "retention",
    "stack",
    "steps",
]
