"""The Synchronizer's two state files, for processes that read them without Ray.

::

    root/.trinity_sync/weights/
      synchronizer.json     address of the actor, written at each start
      state.json            versions, readers and statuses, written after each change

They outlive the process, but need not outlive the machine, since the images in memory do not. So
they are replaced atomically without fsync, and no call waits for a disk.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from trinity_sync.fs.atomic import make_folder, read_uncached, replace_file
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace
from trinity_sync.fs.records import Record, Seconds, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.weights.sync_barrier import Members
from trinity_sync.weights.versions import Reader, RegistryState, Source, VersionRegistry


@dataclass(frozen=True)
class Address(Record):
    """Address of a job's Synchronizer, a Ray actor."""

    name: str
    namespace: str
    host: str
    """Host or container, as `read_process_namespace` names it."""
    process: str
    """pid and start time, as `read_process_identity` returns them."""
    root: str
    """Real path of the job's root: a root that was copied or moved has no Synchronizer yet."""

    @property
    def is_running(self) -> bool | None:
        """Whether its process runs; None on another host, or in another container."""
        return is_process_alive(self.process) if self.host == read_process_namespace() else None


@dataclass(frozen=True)
class SynchronizerState(Record):
    """What a restart has to know of a Synchronizer."""

    job: str
    """The job's id, as `layout.job_id_of` returns it."""
    registry: RegistryState = field(default_factory=RegistryState)
    members: Members = field(default_factory=Members)
    written_at: Seconds = 0.0


def address_path(root: str | Path) -> Path:
    """Return the path of the address file of the job at ``root``."""
    return Path(root) / PRIVATE_FOLDER / "weights" / "synchronizer.json"


def state_path(root: str | Path) -> Path:
    """Return the path of the state file of the job at ``root``."""
    return address_path(root).with_name("state.json")


def write_address(root: str | Path, name: str, namespace: str) -> None:
    """Record this process as the job's Synchronizer."""
    here = read_process_namespace(), read_process_identity(os.getpid())
    address = Address(name, namespace, *here, str(Path(root).resolve()))
    make_folder(address_path(root).parent)
    replace_file(address_path(root), encode_record(address), sync=False)


def read_address(root: str | Path) -> Address | None:
    """Return the address of the job's Synchronizer; None if there is none, or the file is torn."""
    found = read_record(Address, address_path(root), read_uncached)
    return found if found and found.root == str(Path(root).resolve()) else None


def write_state(root: str | Path, state: SynchronizerState) -> None:
    """Replace the state file atomically."""
    replace_file(state_path(root), encode_record(state), sync=False)


def read_state(root: str | Path) -> SynchronizerState | None:
    """Return what `write_state` wrote last; None if there is nothing, or the file is torn."""
    return read_record(SynchronizerState, state_path(root), read_uncached)


@dataclass(frozen=True)
class SyncReport:
    """State of a job's Synchronizer."""

    version: int | None
    """Step of the newest version; null if there is none."""
    run: int | None
    source: Source | None
    """Where it comes from, such as ``memory`` or ``checkpoint``."""
    running: bool | None
    """Whether the Synchronizer runs; null if it is on another host."""
    as_of: float
    """Time for which this holds: that of its last change if it has ended, otherwise now."""
    trainer: str
    """Status of the trainer."""
    explorers: dict[str, str]
    """Status of each explorer, by name."""
    readers: tuple[Reader, ...]
    """The readers."""


def read_sync_report(root: str | Path, now: float) -> SyncReport | None:
    """Return the report of a job; None if it had no Synchronizer.

    Staleness is computed to ``now``, in seconds since the epoch, or to the last change if the
    Synchronizer has ended: what it knew then says nothing about now.
    """
    state, address = read_state(root), read_address(root)
    if state is None:
        return None
    registry = VersionRegistry(state.registry)
    newest = registry.newest()
    running = address.is_running if address else False
    as_of = state.written_at if running is False else now
    return SyncReport(
        version=newest.step if newest else None,
        run=newest.run if newest else None,
        source=newest.source if newest else None,
        running=running,
        as_of=as_of,
        trainer=state.members.trainer,
        explorers=dict(state.members.explorers),
        readers=registry.readers(as_of),
    )
