"""A stack that also has Ray workers of veRL, and the tiny model of the example."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import running_stack
from tests.environments.verl.sft import IMPORTS
from trinity_sync.settings import Settings
from trinity_sync.stack.services import StackState

sys.path[:0] = IMPORTS


@pytest.fixture(scope="session")
def stack(stack_settings: Settings) -> Iterator[StackState]:
    """Prefect server, Ray node and flow worker of the session; the environment names them."""
    with running_stack(
        stack_settings, {"PYTHONPATH": os.pathsep.join(IMPORTS)}, num_cpus=8
    ) as state:
        yield state
