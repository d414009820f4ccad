"""A job on the session's stack, which writes 40 MB/s: a save of 60 MB takes more than a second."""

from pathlib import Path

import pytest
import torch

from trinity_sync import CheckpointCoordinator


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


@pytest.fixture
def saves(saves: CheckpointCoordinator) -> CheckpointCoordinator:
    """A job whose step 1 is committed."""
    saves.save(1, {"model": {"w": torch.ones(10)}})
    saves.wait_all(250)
    return saves
