"""The ``trinity-sync`` command; a module for each group of its commands."""

from trinity_sync.cli import care, catalog, history, retention, stack, steps
from trinity_sync.cli.frame import app

__all__ = ["app", "care", "catalog", "history", "retention", "stack", "steps"]
