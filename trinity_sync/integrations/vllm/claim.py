"""The updater whose update an engine is in; the engine refuses others until it has ended.

vLLM takes one update at a time, but cannot tell one in progress from one whose updater was killed,
which the next updater has to end.
"""

import os
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from trinity_sync.errors import WeightSyncError
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace


@dataclass(frozen=True)
class Claim:
    """One updater, as it tells the workers of the engine in ``init_info``."""

    name: str
    process: str
    """Its pid and start time."""
    namespace: str
    """Host and pid namespace of the process."""
    until: float
    """When all its calls have timed out, in seconds since the epoch."""

    @property
    def lives(self) -> bool:
        """Whether the updater may still be in its update."""
        if self.namespace == read_process_namespace():
            return is_process_alive(self.process)
        return time.time() < self.until


def make_claim(calls_s: float, name: str = "") -> dict[str, Any]:
    """Return the fields of a claim of this process.

    All calls of an update have timed out after ``calls_s``. Without a name, it gets a new one.
    """
    process, namespace = read_process_identity(os.getpid()), read_process_namespace()
    return asdict(Claim(name or uuid.uuid4().hex, process, namespace, time.time() + calls_s))


def require_free(held: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Require that no other updater is in an update.

    Both are the fields of claims: of the update in progress, empty without one, and of the next.

    Raises:
        WeightSyncError: another one is.
    """
    if held and held["name"] != wanted.get("name") and Claim(**held).lives:
        raise WeightSyncError(
            f"process {held['process']} of {held['namespace']} updates this engine; use one "
            "updater for an engine, or try again once it has ended"
        )
