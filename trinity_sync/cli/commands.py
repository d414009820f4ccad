"""Import all commands: each module registers its commands."""

# help shows the groups in this order
# isort: off
from trinity_sync.cli import stack, config, doctor, version  # noqa: F401
from trinity_sync.cli import steps, diff, runs, readers, report, jobs  # noqa: F401
from trinity_sync.cli import retention, tags, metrics, rewind  # noqa: F401
from trinity_sync.cli import maintenance, remote, convert  # noqa: F401
# isort: on

from trinity_sync.cli.app import app

__all__ = ["app"]
