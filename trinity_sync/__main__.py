"""``python -m trinity_sync``, as the command ``trinity-sync``."""

from trinity_sync.cli import main

main()
