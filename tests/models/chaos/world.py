"""What commits, in its own processes, what is trained and read, and how it is put right."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

import httpx
import psutil
from prefect.context import refresh_global_settings_context

from tests.conftest import environment, stopped_if_killed
from tests.integration.prefect_api import Api
from tests.models.chaos.proxy import Proxy
from tests.models.chaos.training import RANKS
from tests.models.chaos.trouble import Trouble
from tests.support.postgres import Postgres
from tests.support.savers import savers_of
from trinity_sync.client.saver_control import LOG
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack import daemon, local_stack, services
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import iter_committed_steps
from trinity_sync.storage.manifest import Manifest

T = TypeVar("T")

DISK_MB, SPOOL_MB = 150, 64
DRIVERS = {"stack": "stack", "saver": "built-in", "both": "auto"}
"""What commits the saves, and the setting ``saver`` of it; ``both`` is a stack that comes and goes.
"""
SAVER_AFTER_S = 5.0
WAIT_S = 240.0
"""Until something counts as hanging, on a machine that also has other work."""


class Hang(Exception):
    """Something did not happen in time; the message says what, and what each process did."""


class World:
    """One job. Use `running`.

    The root and the spool are file systems of their own where this user may mount some: `small`.
    """

    def __init__(self, folder: Path, driver: str) -> None:
        self.folder, self.driver = folder, driver
        self.root, self.disk, self.small = folder / "disk/ckpts", folder / "disk", False
        self.settings = Settings(
            home=folder / "home",
            spool=folder / "spool",
            slot_wait_s=20,
            saver=DRIVERS[driver],  # type: ignore[arg-type]
            saver_after_s=SAVER_AFTER_S,
        )
        self._server_settings = self.settings.model_copy(update={"home": folder / "server"})
        self.server = StackState()
        self.stack = StackState()
        self.proxy: Proxy | None = None
        self.postgres: Postgres | None = None
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.explorer: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._is_away = False
        """Whether the stack is to be away."""
        self.fell: list[str] = []
        """What ended although nobody had killed it."""

    # ------------------------------------------------------------ its beginning and end

    @classmethod
    @contextmanager
    def running(cls, driver: str, *, on_postgres: bool) -> Iterator["World"]:
        folder = Path(tempfile.mkdtemp(prefix="trinity_sync-chaos-", dir="/tmp"))
        world = cls(folder, driver)
        own = {
            "PREFECT_HOME": str(world.settings.home / "prefect"),
            "OMP_NUM_THREADS": "1",
            "TRINITY_SYNC_STACK__IO__MAX_MB_PER_S": "2",
            "TRINITY_SYNC_STACK__RAY__CPUS": "2",
            # next to other work on all cores, a server of the lowest priority never starts
            "TRINITY_SYNC_STACK__WORKER__NICE": "0",
            "TRINITY_SYNC_STACK__MAINTENANCE__SCHEDULES": "false",
        }
        with ExitStack() as open_ones:
            open_ones.enter_context(environment(own))
            open_ones.enter_context(stopped_if_killed(world.settings))
            if on_postgres and (tools := Postgres.tools()):
                world.postgres = open_ones.enter_context(Postgres.running(tools))
            open_ones.callback(world._end)
            world._mount()
            world.repair()
            yield world

    @property
    def possible(self) -> set[str]:
        """What faults may ask for here, by `faults.NEEDS`."""
        have: dict[str, Any] = {
            "mounts": self.small,
            "trouble": self.trouble.environment,
            "postgres": self.postgres,
            "stack": self.has_stack,
            "saver": self.driver != "stack",
            "stack and saver": self.driver == "both",
        }
        return {name for name, here in have.items() if here}

    @property
    def has_stack(self) -> bool:
        """Whether there is a stack, at times at least."""
        return self.driver != "saver"

    @property
    def savers(self) -> list[psutil.Process]:
        return savers_of(self.settings.spool)

    def _mount(self) -> None:
        (self.settings.home / "prefect").mkdir(parents=True)
        for path, size in ((self.disk, DISK_MB), (self.settings.spool, SPOOL_MB)):
            path.mkdir(mode=0o700)
            options = f"size={size}m,mode=0700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
            self.small = subprocess.run(command, capture_output=True).returncode == 0
        self.trouble = Trouble(self.folder, self.disk)

    def _end(self) -> None:
        self.kill_training()
        self.kill_explorer()
        with suppress(Exception):
            local_stack.down(self.settings)
        for saver in self.savers:
            saver.kill()
        for part in self.server.daemons:
            daemon.stop(part, 15.0)
        if self.proxy:
            self.proxy.close()
        for path in (self.disk, self.settings.spool):
            subprocess.run(["umount", "-l", str(path)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------ putting it right

    def _started_server(self) -> bool:
        if (
            not self.server.lives
        ):  # or it has ended: another process may have taken the port just now
            self.server = services.start_server(self._server_settings, StackSettings(), self.server)
        return services.is_server_ready(self.server)

    @contextmanager
    def without_stack(self) -> Iterator[None]:
        """Within the block only trainer and saver of the node run."""
        self._is_away = True
        self.proxy.cut()
        local_stack.down(self.settings)
        try:
            yield
        finally:
            self.proxy.join()
            self._is_away = False

    @property
    def _is_stack_due(self) -> bool:
        """Whether something of a stack does not run that is to run."""
        runs = self.stack.lives and self.server.lives
        return self.has_stack and not self._is_away and not runs

    def repair(self) -> None:
        """Start whatever does not run."""
        if self._is_stack_due:
            self._repair_stack()
        if not self._trains:
            for number, rank in enumerate(self.ranks):
                if rank.poll() is not None:
                    said = self.log(f"rank{number}")[-1500:]
                    self.fell.append(f"rank {number} ended by itself, {rank.returncode}: {said}")
            self.kill_training()
            self.start_training()
        if self.explorer is None or self.explorer.poll() is not None:
            self.explorer = self._start("explorer", "tests.models.chaos.explorer", str(self.root))

    def _repair_stack(self) -> None:
        if not self.server.lives:
            database = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
            url = self.postgres and self.postgres.url.replace("postgresql:", "postgresql+asyncpg:")
            with patch.dict(os.environ, {database: url} if url else {}):
                self.until(self._started_server, "the Prefect server")
        self.proxy = self.proxy or Proxy()
        self.proxy.target = int(self.server.api_url.removesuffix("/api").rpartition(":")[2])
        os.environ["PREFECT_API_AUTH_STRING"] = self.server.api_auth
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{self.proxy.port}/api"
        refresh_global_settings_context()
        if not self.stack.lives:
            with patch.dict(os.environ, self.trouble.environment):
                self.stack = local_stack.up(self.settings, timeout_s=WAIT_S)

    def start_training(self, *, into: list[subprocess.Popen[bytes]] | None = None) -> None:
        self.starts += 1
        meeting = self.folder / f"meeting-{self.starts}"
        self._stop_file.unlink(missing_ok=True)
        ranks = self.ranks if into is None else into
        ranks[:] = [
            self._start(
                f"rank{rank}{'' if into is None else '-second'}",
                "tests.models.chaos.training",
                str(self.root),
                str(rank),
                str(meeting),
                last=str(self._stop_file),
                take_over=into is not None,
            )
            for rank in range(RANKS)
        ]

    def end_training(self) -> None:
        """Let it come to its end: its last saves committed, or seen to have failed."""
        self._stop_file.touch()
        self.until(lambda: all(rank.poll() is not None for rank in self.ranks), "its end")

    def kill_training(self, ranks: list[subprocess.Popen[bytes]] | None = None) -> None:
        killed = self.ranks if ranks is None else ranks
        for rank in killed:
            rank.kill()
            rank.wait()
        killed.clear()

    def kill_explorer(self) -> None:
        if self.explorer:
            self.explorer.kill()
            self.explorer.wait()

    @property
    def environment(self) -> dict[str, str]:
        """That of a process of the node."""
        return services.build_environment(self.settings, StackSettings(), self.stack)

    def _start(
        self, name: str, module: str, *arguments: str, last: str = "", take_over: bool = False
    ) -> "subprocess.Popen[bytes]":
        env = self.environment
        env |= self.trouble.environment | ({"TRINITY_SYNC_TAKE_OVER": "1"} if take_over else {})
        here = str(Path(__file__).parents[3])
        env["PYTHONPATH"] = os.pathsep.join([here, env.get("PYTHONPATH", "")])
        env["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-m", module, *arguments, str(self.folder / f"{name}.jsonl")]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *filter(None, [last])], env=env, stdout=log, stderr=log
            )

    @property
    def _trains(self) -> bool:
        return bool(self.ranks) and all(rank.poll() is None for rank in self.ranks)

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    # ------------------------------------------------------------ looking at it

    def notes(self, name: str = "rank0") -> list[dict[str, Any]]:
        """What a process noted, all its starts together."""
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def read_saver_log(self) -> str:
        path = self.settings.home / LOG
        return path.read_text(errors="replace") if path.exists() else ""

    def commits(self) -> dict[tuple[int, int], Manifest]:
        """By run and step, what is committed now."""
        return {(each.run, each.step): each for each in iter_committed_steps(self.root)}

    def ray_processes(self, title: str) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            every = psutil.Process(self.stack.ray.pid).children(recursive=True)
            return [each for each in every if title in _title(each)]
        return []

    def until(
        self, ask: Callable[[], T | None], what: str, timeout: float = WAIT_S, pause: float = 0.1
    ) -> T:
        """Ask until there is an answer.

        Raises:
            Hang: there is none in time.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if answer := ask():
                return answer
            time.sleep(pause)
        raise Hang(f"waited {timeout:g} s for {what}\n{self.where()}")

    def started(self, parameters: dict[str, Any], deployment: str) -> UUID:
        """A flow run that the server has taken; a busy one may refuse for a while."""

        def ask() -> UUID | None:
            with suppress(httpx.HTTPError):
                return Api().start(parameters, deployment)
            return None

        return self.until(ask, f"a run of {deployment}", pause=1.0)

    def await_commit(self, after: float) -> float:
        """Until a step that was submitted after that time is committed; returns when."""

        def ask() -> float | None:
            if self._is_stack_due or not self._trains:
                self.repair()  # it may notice late what it has lost
            since = {
                (note["run"], note["step"])
                for note in self.notes()
                if note["what"] == "submitted" and note["at"] > after
            }
            return time.monotonic() if max(self.commits(), default=(0, 0)) in since else None

        return self.until(ask, "a commit after the fault")

    def where(self) -> str:
        """What each process does: last notes, stacks, ends of logs."""
        for each in (*self.ranks, self.explorer):
            if each and each.poll() is None:
                each.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        told = [
            f"commits {sorted(self.commits())[-8:]}; parts {self.stack.lives}, "
            f"server {self.server.lives}"
        ]
        for name in ("rank0", "rank1", "explorer"):
            told.append(f"--- {name}: {self.notes(name)[-3:]}\n{self.log(name)[-2500:]}")
        told.append(f"--- savers {self.savers}\n{self.read_saver_log()[-2500:]}")
        for log in sorted(self.folder.glob("*/logs/*.log")):
            told.append(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}")
        return "\n".join(told)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
