"""The coordinator of a job of one rank."""

import pytest

from tests.unit.conftest import Open
from trinity_sync import CheckpointCoordinator

Saves = CheckpointCoordinator


@pytest.fixture
def saves(coordinator_of: Open) -> Saves:
    """A coordinator whose saves the test commits by itself."""
    return coordinator_of()
