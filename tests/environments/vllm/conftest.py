"""A trainer without a stack."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_sync import CheckpointCoordinator


@pytest.fixture
def trainer(
    tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CheckpointCoordinator]:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    with CheckpointCoordinator(tmp_path / "ckpts") as coordinator:
        yield coordinator
