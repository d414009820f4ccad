"""``python -m trinity_sync.cli``."""

from trinity_sync.cli import main

main()
