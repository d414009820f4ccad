"""All commands; a module for each group of them, which registers them when it is imported."""

# help shows the groups in this order
# isort: off
from trinity_sync.cli import stack, doctor  # noqa: F401
from trinity_sync.cli import steps, compare, report, weights, catalog  # noqa: F401
from trinity_sync.cli import retention, tags, history  # noqa: F401
from trinity_sync.cli import care, copies, convert  # noqa: F401
# isort: on

from trinity_sync.cli.frame import app

__all__ = ["app"]
