"""Leases that a test holds without a block."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.storage.steps_in_use import lease_to_read

_HELD: dict[Path, ExitStack] = {}


@dataclass(frozen=True)
class HeldLease:
    """A lease of this process; other processes may pass it on."""

    step: int
    path: Path

    def release(self) -> None:
        _HELD.pop(self.path, ExitStack()).close()

    def __enter__(self) -> "HeldLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire_lease(root: Path, step: int, holder: str, **other: float) -> HeldLease:
    """Acquire a lease, which lasts until it is released or this process ends."""
    folder, held = root / ".trinity_sync/leases", ExitStack()
    before = {*folder.glob("*")}
    held.enter_context(lease_to_read(root, step, holder, **other))
    path = min({*folder.glob(f"{step}.*")} - before)
    _HELD[path] = held
    return HeldLease(step, path)
