"""The ``trinity-sync`` command; a module for each group of its commands, each registers its own."""

from trinity_sync.cli import (  # noqa: F401
    care,
    catalog,
    compare,
    copies,
    doctor,
    history,
    report,
    retention,
    stack,
    steps,
    weights,
)
from trinity_sync.cli.frame import app

__all__ = ["app"]
