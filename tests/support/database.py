"""Prefect's database as a new server leaves it, which takes a core seven seconds to make."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.settings import Settings

BUILD = Path(__file__).parents[2] / "build"
MAKE = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]


def lay_tables(settings: Settings) -> None:
    """Give the server of a stack its tables, unless it has a database."""
    if (folder := settings.home / "prefect").exists():
        return
    BUILD.mkdir(exist_ok=True)
    made = BUILD / f"prefect-{version('prefect')}.db"
    with acquire_file_lock(made.with_suffix(".lock")):
        if not made.exists():
            with TemporaryDirectory(dir=BUILD) as beside:
                env = {name: of for name, of in os.environ.items() if "PREFECT_" not in name}
                env["PREFECT_HOME"] = beside
                subprocess.run(MAKE, env=env, check=True, stdout=subprocess.DEVNULL)
                Path(beside, "prefect.db").rename(made)
    settings.home.mkdir(0o700, exist_ok=True)
    folder.mkdir(0o700)
    shutil.copy(made, folder / "prefect.db")
