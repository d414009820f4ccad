"""A second container of the node: a process with mounts of its own, which shares the spool.

It sees no root of the first container, and a root that the first one does not see. Its saver is its
own. It does what the lines that it reads say, and answers each by a line.
"""

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.support.driven_saver import Node
from tests.support.forked import Program
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import RootAwayError
from trinity_sync.settings import Settings

NEW_MOUNTS, BIND, PRIVATE, DETACH = 0x20000, 0x1000, 0x44000, 2
PROGRAM = "from tests.models.promised_container import serve; serve()"
libc = ctypes.CDLL(None, use_errno=True)


class Container:
    """The first container's side: tells the process what to do."""

    def __init__(self) -> None:
        self._program = Program(PROGRAM, talks=True)
        self.exists = self._program.stdout.readline() == "ready\n"
        """Whether this user may make one."""

    def do(self, what: str, *arguments: object) -> Any:
        self._program.stdin.write(json.dumps([what, *map(str, arguments)]) + "\n")
        self._program.stdin.flush()
        said = json.loads(self._program.stdout.readline())
        assert "error" not in said, said["error"]
        return said["said"]

    def clear(self) -> None:
        self._program.clear()


class Inside:
    """What happens in the container; ``folder`` has the spool and ``inside``, its root."""

    def begin(self, folder: str) -> None:
        self._folder, self._root = folder, f"{folder}/container"
        spool, self._own = (
            os.open(f"{folder}/{name}", os.O_RDONLY) for name in ("spool", "inside")
        )
        mount("tmpfs", folder, "tmpfs")
        for name in ("spool", "container", "home"):
            Path(folder, name).mkdir(mode=0o700)
        mount(f"/proc/self/fd/{spool}", f"{folder}/spool")
        os.close(spool)
        self.get_root_back()
        place = {"spool": Path(folder, "spool"), "home": Path(folder, "home")}
        settings = Settings(**place, slot_wait_s=0, saver="built-in")
        self._node = Node(settings.spool)
        trigger = self._node.make_trigger(settings)
        self._saves = CheckpointCoordinator(self._root, settings=settings, trigger=trigger)

    def save(self, step: str) -> bool:
        """Save a step; return whether it was submitted, as a first one without a root is not."""
        try:
            self._saves.save(int(step), {"model": {"w": torch.full((3,), float(step))}})
        except RootAwayError:
            return False
        return True

    def work(self) -> None:
        """Let the container's saver do all that it sees."""
        self._node.recover_images(Path(self._folder, "spool"))
        for run in list(self._node.runs.values()):
            while run.attempts:
                run.advance(run.attempts[0])

    def lose_root(self) -> None:
        libc.umount2(self._root.encode(), DETACH)

    def get_root_back(self) -> None:
        mount(f"/proc/self/fd/{self._own}", self._root)

    def end(self) -> None:
        self._saves.close(timeout=0)
        self._node.end()
        os.close(self._own)
        libc.umount2(self._folder.encode(), DETACH)


def mount(what: str, at: str, kind: str = "", flags: int = BIND) -> None:
    given = (what.encode(), at.encode(), kind.encode(), 0 if kind else flags, None)
    if libc.mount(*given):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), at)


def serve() -> None:
    """Do what is read, in mounts of its own."""
    if libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, PRIVATE, None):
        print("no mounts of its own", flush=True)
        return
    inside = Inside()
    print("ready", flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            said = {"said": getattr(inside, what)(*arguments)}
        except Exception:
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), flush=True)
