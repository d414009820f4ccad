"""Tokens to train on, and saves that are committed without a server."""

from pathlib import Path
from typing import Any

import torch

from tests.integration.fsdp.commits import CommitsHere
from trinity_sync import Settings
from trinity_sync.client.save_request import SaveRequest

TOKENS = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))


class Fails(CommitsHere):
    def submit(self, request: SaveRequest) -> None:
        self._failed[request.key] = "the disk is full"


def commit_here(home: Path, spool: Path, trigger: CommitsHere | None = None) -> dict[str, Any]:
    """Arguments of a callback whose saves need no server."""
    return {"settings": Settings(spool=spool, home=home), "trigger": trigger or CommitsHere()}
