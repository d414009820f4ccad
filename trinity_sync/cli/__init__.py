"""The ``trinity-sync`` command; a module for each group of its commands."""

from trinity_sync.cli import care, copies, history, retention, stack, steps, weights
from trinity_sync.cli.frame import app

__all__ = ["app", "care", "copies", "history", "retention", "stack", "steps", "weights"]
