"""A second Ray node on this machine, with a spool and a name of its own."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.conftest import SPOOLS
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.stack import daemon, services
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState
from trinity_sync.storage.placement import group_by_node

JOIN = """
import ray._private.services as services
services.resolve_ip_for_localhost = str
from ray.scripts.scripts import main
main()
"""
"""Joins a cluster at 127.0.0.1, which ``ray start`` refuses: such a cluster has one node."""


@contextmanager
def joined(stack: StackState, settings: Settings, name: str) -> Iterator[tuple[Settings, Daemon]]:
    """A node that joins the stack's cluster; what processes on it have for settings, and it."""
    spool = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
    there = settings.model_copy(update={"node": name, "spool": spool})
    command = [sys.executable, "-c", JOIN, "start", "--block"]
    command += [f"--address={stack.ray_address}", f"--node-name={name}", "--num-cpus=1"]
    command += ["--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    env = services.build_environment(there, StackSettings(), stack)
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    log = settings.home / f"logs/{name}-{spool.name}.log"
    node = daemon.start(command, env=env, cwd=settings.home, log=log)
    try:
        until(lambda: "Ray runtime started" in log.read_text(), f"node {name} to join")
        yield there, node
    finally:
        daemon.stop(node, 10)
        shutil.rmtree(spool)


def kill(node: Daemon) -> None:
    """All processes of the node, at once."""
    parent = psutil.Process(node.pid)
    every = [parent, *parent.children(recursive=True)]
    for process in every:
        process.send_signal(signal.SIGSTOP)
    for process in every:
        process.kill()
    psutil.wait_procs(every, 10)


@contextmanager
def a_rank_on_each(root: Path, nodes: Sequence[Settings]) -> Iterator[list[CheckpointCoordinator]]:
    """Coordinators of a job, all in this process."""
    open_identity(root)
    where = [(node.node, str(open_job_spool(node.spool, root).folder)) for node in nodes]
    places, world_size = group_by_node(where), len(nodes)
    with ExitStack() as closing:
        ranks = []
        for rank, settings in enumerate(nodes):
            saves = CheckpointCoordinator(
                root,
                rank=rank,
                world_size=world_size,
                places=places,
                run_key="one",
                settings=settings,
            )
            closing.callback(saves.close)
            ranks.append(saves)
        yield ranks


def await_freed(*ranks: CheckpointCoordinator) -> None:
    """Until no image waits in the memory of any of their nodes."""
    until(lambda: not any(saves.spool.tickets()[0] for saves in ranks), "the slots to be freed")
