"""The Synchronizer's two small files, for those who look at it without Ray.

::

    root/.trinity_sync/weights/
      synchronizer.json     who it is: written at each start of the actor
      state.json            what it knows: written after each change

They outlive the process and need not outlive the machine, which takes the images in memory with it;
so they are replaced atomically and not synced, and nobody waits for a disk.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_sync.fs.atomic import make_folder, read_uncached, replace_file
from trinity_sync.fs.process import process_home, process_lives, process_name
from trinity_sync.fs.records import R, Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT


@dataclass(frozen=True)
class Address(Record, format=ROOT_FORMAT):
    """Where a job's Synchronizer is."""

    name: str
    """Of the Ray actor."""
    namespace: str
    """Its Ray namespace."""
    host: str
    """As `process_home` names it."""
    process: str
    """pid and start time."""

    @property
    def lives(self) -> bool | None:
        """Whether its process runs; None on another host than its own, or in another container."""
        return process_lives(self.process) if self.host == process_home() else None


@dataclass(frozen=True)
class _State(Record, format=ROOT_FORMAT):
    state: dict[str, Any]


def address_file(root: str | Path) -> Path:
    """Where the Synchronizer of the job at ``root`` says who it is."""
    return Path(root) / PRIVATE_FOLDER / "weights" / "synchronizer.json"


def state_file(root: str | Path) -> Path:
    """Where it keeps what it knows."""
    return address_file(root).with_name("state.json")


def write_address(root: str | Path, name: str, namespace: str) -> None:
    """Say that this process is the Synchronizer of the job."""
    address = Address(name, namespace, process_home(), process_name(os.getpid()))
    make_folder(address_file(root).parent)
    replace_file(address_file(root), encode_record(address), sync=False)


def read_address(root: str | Path) -> Address | None:
    """Who the job's Synchronizer is; None if there is none.

    Raises:
        FormatError: it is of another release.
    """
    return _read(Address, address_file(root))


def write_state(root: str | Path, state: Mapping[str, Any]) -> None:
    """Replace what is known, atomically."""
    replace_file(state_file(root), encode_record(_State(dict(state))), sync=False)


def read_state(root: str | Path) -> dict[str, Any] | None:
    """What `write_state` wrote last; None if there is nothing, or nothing whole.

    Raises:
        FormatError: a Synchronizer of another release has written it.
    """
    found = _read(_State, state_file(root))
    return found.state if found else None


def _read(kind: type[R], path: Path) -> R | None:
    try:
        return decode_record(kind, read_uncached(path), path)
    except (FileNotFoundError, ValueError):
        return None
