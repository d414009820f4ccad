"""What is done to a `World`. Each ends its trouble itself; `World.repair` restarts what died.

A fault is a function of the world and a source of chance. Those that strike at a moment wait for
it: a rank about to stage, at it, just sealed, its files half written, its commit near.
"""

import errno
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import psutil

from tests.models.chaos.world import Hang, World

Fault = Callable[[World, Random], None]
FAULTS: dict[str, Fault] = {}
NEEDS: dict[str, str] = {}
"""What of `World.possible` a fault asks for; empty for nothing."""


def fault(body: Fault, needs: str = "") -> Fault:
    kind = body.__name__.replace("_", " ")
    FAULTS[kind], NEEDS[kind] = body, needs
    return body


of_stack = partial(fault, needs="stack")
of_saver = partial(fault, needs="saver")
on_own_mounts = partial(fault, needs="mounts")
by_trouble = partial(fault, needs="trouble")


def moment(world: World, random: Random, what: str = "staging") -> None:
    """Wait for the next note of a rank, and then any time up to that of a whole save."""
    since = time.monotonic()
    world.until(
        lambda: any(n["what"] == what and n["at"] > since for n in world.notes()), what, pause=0.002
    )
    time.sleep(random.choice((0.0, 0.003, 0.01, 0.05, 0.3, 0.8, 1.5)))


def in_mid_write(world: World) -> None:
    """Wait until some shard is half written."""
    world.until(lambda: list(world.root.glob("global_step_*/actor/.*.tmp")), "bytes", pause=0.01)


def pause_of(process: psutil.Process, seconds: float) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


@fault
def trainer_rank_killed(world: World, random: Random) -> None:
    moment(world, random, random.choice(("staging", "submitted")))
    world.ranks[random.randrange(2)].kill()
    time.sleep(0.2)
    world.kill_training()  # as a launcher does with the others


@fault
def all_ranks_killed_after_submitting(world: World, random: Random) -> None:
    moment(world, random, "submitted")
    world.kill_training()


@fault
def trainer_rank_stopped(world: World, random: Random) -> None:
    moment(world, random)
    pause_of(psutil.Process(world.ranks[random.randrange(2)].pid), random.uniform(1, 6))


@of_saver
def saver_killed(world: World, random: Random) -> None:
    in_mid_write(world)
    time.sleep(random.choice((0.0, 0.01, 0.05, 0.3, 0.8)))  # up to the commit, and after it
    for saver in world.savers:
        with suppress(psutil.NoSuchProcess):
            saver.kill()


@of_saver
def saver_stopped(world: World, random: Random) -> None:
    moment(world, random, "submitted")
    for saver in world.savers:
        pause_of(saver, random.uniform(1, 10))


@partial(fault, needs="stack and saver")
def stack_goes(world: World, random: Random) -> None:
    """Worker, Ray and the way to the server go; the saver commits until they are back."""
    moment(world, random, random.choice(("staging", "submitted")))
    with world.without_stack():
        over = time.monotonic()
        time.sleep(random.uniform(0, 8))
        world.await_commit(over)


@of_stack
def writer_killed(world: World, random: Random) -> None:
    in_mid_write(world)
    writers = [
        *world.ray_processes("ray::persist-model"),
        *world.ray_processes("ray::persist-optim"),
    ]
    if writers:
        with suppress(psutil.NoSuchProcess):
            random.choice(writers).kill()


@of_stack
def raylet_killed(world: World, random: Random) -> None:
    in_mid_write(world)
    node = world.stack.ray
    for each in world.ray_processes("raylet/raylet"):
        each.kill()
    with suppress(Hang):
        world.until(lambda: not node.lives, "the end of the Ray node", 20)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(node.pid).terminate()
    world.until(lambda: not node.lives, "the end of the Ray node")


@of_stack
def worker_killed(world: World, random: Random) -> None:
    moment(world, random, "submitted")
    psutil.Process(world.stack.worker.pid).kill()


@of_stack
def worker_stopped(world: World, random: Random) -> None:
    moment(world, random, "submitted")
    pause_of(psutil.Process(world.stack.worker.pid), random.uniform(1, 10))


@of_stack
def server_killed(world: World, random: Random) -> None:
    moment(world, random, random.choice(("staging", "submitted")))
    server = psutil.Process(world.server.server.pid)
    for each in (*server.children(recursive=True), server):
        each.kill()
    time.sleep(random.uniform(0, 8))


@of_stack
def server_stopped(world: World, random: Random) -> None:
    moment(world, random)
    pause_of(psutil.Process(world.server.server.pid), random.uniform(1, 8))


@of_stack
def network_cut(world: World, random: Random) -> None:
    moment(world, random, random.choice(("staging", "submitted")))
    world.proxy.cut()
    time.sleep(random.uniform(0.5, 8))
    world.proxy.join()


@fault
def explorer_killed(world: World, random: Random) -> None:
    moment(world, random, "submitted")
    world.kill_explorer()


@on_own_mounts
def full_disk(world: World, random: Random) -> None:
    moment(world, random)
    ballast = world.disk / "ballast"
    _fill(ballast)
    time.sleep(random.uniform(1, 5))
    ballast.unlink()


@on_own_mounts
def full_spool(world: World, random: Random) -> None:
    moment(world, random)
    ballast = world.settings.spool / "ballast"
    _fill(ballast)
    time.sleep(random.uniform(1, 5))
    ballast.unlink()


@on_own_mounts
def permissions_withdrawn(world: World, random: Random) -> None:
    """Root may write everywhere, but not to what may not be altered."""
    moment(world, random)
    alter = ["chattr", "-R", "-f"]
    try:
        subprocess.run([*alter, "+i", str(world.root)])  # what vanishes meanwhile is an error
        time.sleep(random.uniform(1, 4))
    finally:
        subprocess.run([*alter, "-i", str(world.root)], check=True)


@by_trouble
def disk_errors(world: World, random: Random) -> None:
    moment(world, random)
    with world.trouble.made(error=errno.EIO):
        time.sleep(random.uniform(0.5, 4))


@by_trouble
def read_only_disk(world: World, random: Random) -> None:
    """As the calls see it: no remount succeeds while a process has a file open for writing."""
    moment(world, random)
    with world.trouble.made(error=errno.EROFS):
        time.sleep(random.uniform(1, 4))


@by_trouble
def slow_disk(world: World, random: Random) -> None:
    moment(world, random)
    with world.trouble.made(delay_s=random.uniform(0.05, 0.5)):
        time.sleep(random.uniform(2, 8))


@by_trouble
def clock_jumps(world: World, random: Random) -> None:
    """Forward or back, and again to where it was."""
    moment(world, random)
    with world.trouble.made(clock_s=random.choice((-86400, -3600, -30, 30, 3600, 86400))):
        time.sleep(random.uniform(1, 8))


@partial(fault, needs="postgres")
def database_killed(world: World, random: Random) -> None:
    moment(world, random, random.choice(("staging", "submitted")))
    world.postgres.kill()
    time.sleep(random.uniform(0, 5))
    world.postgres.start()


@fault
def second_trainer(world: World, random: Random) -> None:
    """It takes the root over. It resumes, so what the first one saves is refused."""
    second: list[subprocess.Popen[bytes]] = []
    before = len(world.notes("rank0-second"))
    world.start_training(into=second)

    def has_saved() -> bool:
        new = world.notes("rank0-second")[before:]
        ended = any(rank.poll() is not None for rank in (*second, *world.ranks))
        return ended or "submitted" in [note["what"] for note in new]

    try:
        world.until(has_saved, "the second training to save")
        time.sleep(random.uniform(0, 3))
    finally:
        world.kill_training(second)
        world.kill_training()  # the start that notices ends both


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
