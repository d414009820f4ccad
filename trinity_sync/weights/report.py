"""Who serves which version, read from the Synchronizer's files: for people, without Ray."""

from dataclasses import dataclass
from pathlib import Path

from trinity_sync.weights.registry.versions import Reader, VersionRegistry
from trinity_sync.weights.state_files import read_address, read_state
from trinity_sync.weights.version import Version


@dataclass(frozen=True)
class Report:
    """What the job's Synchronizer knew when it last wrote."""

    newest: Version | None
    readers: tuple[Reader, ...]
    trainer: str
    """Status of the trainer."""
    explorers: dict[str, str]
    """Explorer's name -> status."""
    written_at: float
    """Seconds since the epoch of the last change."""
    lives: bool | None
    """Whether the Synchronizer's process runs; None if it is on another host."""
    address: str
    """``namespace/name`` of its Ray actor; empty once it was stopped."""


def report(root: str | Path, now: float) -> Report | None:
    """The report as of ``now``, seconds since the epoch; None if the job had no Synchronizer."""
    state, address = read_state(root), read_address(root)
    if state is None:
        return None
    try:
        registry, barrier = VersionRegistry.from_json(state["registry"]), state["barrier"]
        return Report(
            newest=registry.newest(),
            readers=registry.readers(now),
            trainer=barrier["trainer"],
            explorers=dict(barrier["explorers"]),
            written_at=float(state["written_at"]),
            lives=address.lives if address else False,
            address=f"{address.namespace}/{address.name}" if address else "",
        )
    except (KeyError, TypeError, ValueError):
        return None
