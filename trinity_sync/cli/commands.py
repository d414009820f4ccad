"""Import all commands: each module registers its commands."""

# help shows the groups in this order
# isort: off
from trinity_sync.cli import stack, config, doctor  # noqa: F401
from trinity_sync.cli import steps, runs, report, jobs  # noqa: F401
from trinity_sync.cli import retention  # noqa: F401
from trinity_sync.cli import verify, copies  # noqa: F401
# isort: on

from trinity_sync.cli.app import app

__all__ = ["app"]
