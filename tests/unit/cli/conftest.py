"""The command has a home of its own, in which there is no stack."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home that the environment names, next to a spool; neither exists yet."""
    folder = tmp_path / "home"
    for name, value in (("HOME", folder), ("SPOOL", tmp_path / "spool")):
        monkeypatch.setenv(f"TRINITY_SYNC_{name}", str(value))
    monkeypatch.setenv("PREFECT_API_URL", "")
    return folder
