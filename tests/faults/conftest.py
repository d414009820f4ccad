"""A job on the session's stack, which writes 40 MB/s: a save of 60 MB takes more than a second."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.prefect_api import Api
from trinity_sync.coordinator import CheckpointCoordinator
from trinity_sync.orchestration.parts import StackState
from trinity_sync.settings import Settings


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


@pytest.fixture
def api(stack: StackState) -> Api:
    return Api()


@pytest.fixture
def saves(
    stack: StackState, stack_settings: Settings, root: Path
) -> Iterator[CheckpointCoordinator]:
    """A job whose step 1 is committed."""
    coordinator = CheckpointCoordinator(root, settings=stack_settings)
    coordinator.save(1, {"model": {"w": torch.ones(10)}})
    coordinator.wait_all(120)
    yield coordinator
    coordinator.close()
