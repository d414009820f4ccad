"""Report of the versions that readers serve, from the Synchronizer's state files, without Ray."""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.weights.registry.versions import Reader, VersionRegistry
from trinity_sync.weights.state_files import read_address, read_state
from trinity_sync.weights.version import Version


@dataclass(frozen=True)
class SyncReport:
    """State of a job's Synchronizer when it last wrote its state file."""

    newest: Version | None
    readers: tuple[Reader, ...]
    trainer: str
    explorers: dict[str, str]
    """Status by name."""
    written_at: float
    """Seconds since the epoch of the last change."""
    lives: bool | None
    """Whether the Synchronizer's process runs; None if it is on another host."""
    address: str
    """``namespace/name`` of its Ray actor; empty once it was stopped."""


def read_sync_report(root: str | Path, now: float) -> SyncReport | None:
    """Return the report of a job; None if it had no Synchronizer.

    Staleness is computed to ``now``, in seconds since the epoch.

    Raises:
        FormatError: another release has written a state file.
    """
    state, address = read_state(root), read_address(root)
    if state is None:
        return None
    try:
        registry, barrier = VersionRegistry.from_json(state["registry"]), state["barrier"]
        return SyncReport(
            newest=registry.newest(),
            readers=registry.readers(now),
            trainer=barrier["trainer"],
            explorers=dict(barrier["explorers"]),
            written_at=float(state["written_at"]),
            lives=address.is_running if address else False,
            address=f"{address.namespace}/{address.name}" if address else "",
        )
    except (KeyError, TypeError, ValueError):
        return None
