"""What tests of trainers call: callbacks that save without a server, and programs of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.ranks import own_process

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest) -> Iterator[Call]:
    """A process that has imported the ``PROGRAMS`` of the test's module."""
    with own_process(request.module.PROGRAMS) as call:
        yield call


@pytest.fixture
def call(process: Call, tmp_path: Path, spool_folder: Path) -> Call:
    """Calls a program by its name, with the folder and the spool of this test."""
    return lambda program, *arguments: process(program, tmp_path, spool_folder, *arguments)
