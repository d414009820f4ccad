"""Who still needs a step: leases of readers, pins of people, and the lock of whoever removes steps.

::

    root/.trinity_sync/
      claims.lock                       shared to take a lease or pin, exclusive to remove steps
      leases/40.{random}.json           a reader's claim on step 40 for so many seconds
      pins/40.json                      step 40 is kept until it is unpinned

A claim is a file, so it needs no server, and holds for every node that sees the root. A lease is
taken under the shared lock and only of a step that is committed; steps are removed under the
exclusive lock and only when nobody claims them. So a reader has its step or an error, never a
folder that vanishes under its hands. A reader that died without giving its lease back blocks a
step until the lease ends; not at all where its process is known to be gone.
"""

import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.snapshot.receipt import process_lives, process_name
from trinity_sync.storage.durable import make_folder, replace_file
from trinity_sync.storage.locks import file_lock
from trinity_sync.storage.steps import require_committed

LEASE_S = 600.0
"""Seconds that a lease lasts unless it is renewed."""
LONG_LEASE_S = 86_400.0
"""The same for who reads whole steps; a lease ends earlier with its process."""


@dataclass(frozen=True)
class Lease:
    """A reader's claim on a step."""

    step: int
    holder: str
    """Who reads, for people."""
    host: str
    process: str
    """``pid/start time`` on that host."""
    ttl_s: float
    path: Path
    """The file; its time of change is when the lease was taken or renewed."""

    def renew(self) -> None:
        """Let the lease begin anew.

        Raises:
            CommitError: it had ended and was removed; the step may be gone.
        """
        try:
            os.utime(self.path)
        except FileNotFoundError:
            raise CommitError(
                f"the lease of {self.holder} on step {self.step} had ended ({self.path} is gone); "
                "take a new one, of the newest step"
            ) from None

    def release(self) -> None:
        """Give the step up; again is harmless."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class Pin:
    """A step that is kept until it is unpinned."""

    step: int
    reason: str
    pinned_at: float
    """Seconds since the epoch."""


def take_lease(root: str | Path, step: int, holder: str, *, ttl_s: float = LEASE_S) -> Lease:
    """Claim a committed step for ``ttl_s`` seconds; a context manager that gives it back.

    Raises:
        CommitError: the step is not committed, or damaged.
    """
    with _committed(root, step):
        path = _folder(root, "leases") / f"{step}.{uuid.uuid4().hex}.json"
        lease = Lease(step, holder, socket.gethostname(), process_name(os.getpid()), ttl_s, path)
        body = asdict(lease)
        del body["path"]
        replace_file(path, json.dumps(body))
        return lease


def leases(root: str | Path, *, clock: Callable[[], float] = time.time) -> list[Lease]:
    """The leases that hold; those that ended, or whose process is gone, are removed."""
    found = []
    for path in sorted((Path(root) / PRIVATE_FOLDER / "leases").glob("[0-9]*.json")):
        try:
            taken_at = path.stat().st_mtime
            lease = Lease(**json.loads(path.read_text()), path=path)
        except FileNotFoundError:
            continue  # given back meanwhile
        except (ValueError, TypeError):
            step, _, _ = path.name.partition(".")
            lease = Lease(int(step), "unknown (its file is torn)", "", "", LEASE_S, path)
        gone = lease.host == socket.gethostname() and not process_lives(lease.process)
        if gone or clock() > taken_at + lease.ttl_s:
            path.unlink(missing_ok=True)
        else:
            found.append(lease)
    return found


def pin(
    root: str | Path, step: int, reason: str = "", *, clock: Callable[[], float] = time.time
) -> Pin:
    """Keep a committed step until it is unpinned.

    Raises:
        CommitError: the step is not committed, or damaged.
    """
    with _committed(root, step):
        made = Pin(step, reason, clock())
        replace_file(_folder(root, "pins") / f"{step}.json", json.dumps(asdict(made)))
        return made


def unpin(root: str | Path, step: int) -> bool:
    """Give a pinned step up; whether it was pinned."""
    try:
        (Path(root) / PRIVATE_FOLDER / "pins" / f"{step}.json").unlink()
    except FileNotFoundError:
        return False
    return True


def pins(root: str | Path) -> dict[int, Pin]:
    """The pins by step; one whose file is torn still holds."""
    found = {}
    for path in sorted((Path(root) / PRIVATE_FOLDER / "pins").glob("[0-9]*.json")):
        step = int(path.stem)
        try:
            found[step] = Pin(**json.loads(path.read_text()))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError):
            found[step] = Pin(step, "unknown (its file is torn)", path.stat().st_mtime)
    return found


def claimed(root: str | Path) -> dict[int, list[str]]:
    """The steps that are pinned or leased, each with who holds it, in words."""
    found: dict[int, list[str]] = defaultdict(list)
    for step, each in pins(root).items():
        found[step].append(f"pinned: {each.reason}" if each.reason else "pinned")
    for lease in leases(root):
        found[lease.step].append(f"leased by {lease.holder}")
    return found


@contextmanager
def nobody_claims(root: str | Path) -> Iterator[None]:
    """No lease or pin comes into being within such a block: for whoever removes steps.

    Look at `leases` and `pins` inside, and take a step's name away before the block ends.
    """
    with file_lock(_lock_of(root)):
        yield


@contextmanager
def _committed(root: str | Path, step: int) -> Iterator[None]:
    """Nobody removes the step within such a block, and it is committed at its beginning."""
    if not _lock_of(root).exists():  # nor is a root made that is not mounted here
        require_committed(root, step)
    with file_lock(_lock_of(root), shared=True):
        require_committed(root, step)
        yield


def _lock_of(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "claims.lock"


def _folder(root: str | Path, name: str) -> Path:
    folder = Path(root) / PRIVATE_FOLDER / name
    make_folder(folder)
    return folder
