"""``python -m trinity_sync.cli``."""

from trinity_sync.cli.frame import app

app()
