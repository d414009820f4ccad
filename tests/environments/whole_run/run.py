"""What all processes of one start of the run know, and how they find each other."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

ROLES = ("actor", "controller", "queue")
"""Roles that make one checkpoint; rollout workers have no state."""
TRAINERS, WORKERS = 2, 2
WAIT_S = 60.0
SAVE_EVERY = 4
"""Steps between two saves."""
BEHIND_S = 0.3
"""Seconds for which a role goes on before it saves, at every fifth cut."""


@dataclass(frozen=True)
class Run:
    """One start of the whole run.

    Attributes:
        folder: folder of all starts, with the root.
        number: number of this start, from 1 on.
        key: key of this start.
        prompts: size of the dataset; its prompts are numbered from 0 on.
    """

    folder: Path
    number: int
    key: str
    prompts: int

    @property
    def root(self) -> Path:
        return self.folder / "ckpts"

    @property
    def truth(self) -> Path:
        """What was trained, whatever has been saved of it."""
        return self.folder / "truth.jsonl"

    @property
    def own(self) -> Path:
        """Folder of this start alone."""
        return self.folder / f"start-{self.number}"

    @property
    def _controller(self) -> str:
        return f"ipc://{self.own / 'controller.socket'}"

    def note(self, **content: Any) -> None:
        """Append a line to the truth; it stays there if this process is killed."""
        with self.truth.open("ab", buffering=0) as file:
            file.write(json.dumps({"start": self.number, **content}).encode() + b"\n")

    def tell(self, name: str, content: Any = None) -> None:
        """Tell all processes of this start, once."""
        written = self.own / f"{name}.written"
        written.write_text(json.dumps(content))
        written.rename(self.own / name)

    def ask(self, name: str) -> Any:
        """Wait for what a process tells."""
        path, deadline = self.own / name, time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody told {name} within {WAIT_S:.0f} s")
            time.sleep(0.01)
        return json.loads(path.read_text())

    @contextmanager
    def serve_controller(self) -> Iterator[zmq.Socket[bytes]]:
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.bind(self._controller)
            self.tell("controller")
            yield socket

    @contextmanager
    def connect(self) -> Iterator[Callable[[str, Any], Any]]:
        """Yield a function that asks the controller."""
        self.ask("controller")
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.connect(self._controller)

            def ask(what: str, content: Any = None) -> Any:
                socket.send_pyobj((what, content))
                return socket.recv_pyobj()

            yield ask


def is_behind(role: str, step: int) -> bool:
    """Return whether a role saves later than the others, so that each order occurs."""
    return step // SAVE_EVERY % 5 == ROLES.index(role)


def any_behind(step: int) -> bool:
    return any(is_behind(role, step) for role in ROLES[1:])
