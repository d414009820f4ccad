"""Prefect's database as a new server leaves it, which takes a core seven seconds to make."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.settings import Settings

BUILD = Path(__file__).parents[2] / "build"
MAKE = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]


def lay_tables(settings: Settings) -> None:
    """Give the server of a stack that has not started yet its tables."""
    BUILD.mkdir(exist_ok=True)
    made = BUILD / f"prefect-{version('prefect')}.db"
    with acquire_file_lock(made.with_suffix(".lock")):
        if not made.exists():
            new = made.with_suffix(".new")
            new.unlink(missing_ok=True)
            url = {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{new}"}
            subprocess.run(MAKE, env=os.environ | url, check=True, stdout=subprocess.DEVNULL)
            new.rename(made)
    settings.home.mkdir(0o700, exist_ok=True)
    (folder := settings.home / "prefect").mkdir(0o700)
    shutil.copy(made, folder / "prefect.db")
