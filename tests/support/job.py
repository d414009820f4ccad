"""A job without Prefect or Ray: real slots, real files, the bodies of the tasks called directly."""

import re
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration.recovery.flow_runs import look_at_jobs
from trinity_sync.orchestration.root_threads import RootVisits
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import Origin, SaveId, open_identity, read_identity
from trinity_sync.snapshot.packed import pack, read_folder
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Staged, StagePlan, Stager
from trinity_sync.storage.commit import commit, free_committed_slots
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards, group_by_node, write_placement
from trinity_sync.storage.runs import list_runs
from trinity_sync.storage.uncommitted import Written


def find_orphaned_saves(spool: Path, **how: Any) -> list[SaveRequest]:
    """What `find_pending_saves` finds in a spool."""
    return look_at_jobs(RootVisits("test"), spool, partial(find_pending_saves, **how))


@contextmanager
def held(stager: Stager) -> Iterator[None]:
    """Let what is staged within the block with ``overlap`` be copied after it."""
    begin, copy = threading.Event(), stager.copy

    def copy_later(plan: StagePlan) -> Staged:
        assert begin.wait(250)
        return copy(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stager, "copy", copy_later)
        try:
            yield
        finally:
            begin.set()


@dataclass
class Job:
    """One job of ``world_size`` ranks on this node, all driven by the test."""

    root: Path
    spool: JobSpool
    world_size: int = 1
    roles: tuple[str, ...] = ("actor",)
    stagers: dict[int, Stager] = field(default_factory=dict)
    _identities: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, spool: Path, world_size: int = 1) -> "Job":
        """A job in a root of its own, which may be an empty folder or not exist."""
        root.mkdir(exist_ok=True)
        open_identity(root)
        return cls(root, open_job_spool(spool, root), world_size)

    @property
    def identity(self) -> str:
        """Identity of the root, also of one that has been removed."""
        if self.root not in self._identities:
            self._identities[self.root] = read_identity(self.root)
        return self._identities[self.root]

    def __post_init__(self) -> None:
        assert self.identity is not None  # read before the root hangs or is removed

    def origin(self, step: int, *, rank: int = 0, run: int = 1, **other: Any) -> Origin:
        fields: dict[str, Any] = {
            "root": str(self.root),
            "run": run,
            "run_key": self.key_of(run),
            "identity": self.identity,
            "step": step,
            "kind": "checkpoint",
            "role": "actor",
            "roles": self.roles,
            "rank": rank,
            "world_size": self.world_size,
        }
        return Origin(**{**fields, **other})

    def stager(self, rank: int = 0) -> Stager:
        if rank not in self.stagers:
            self.stagers[rank] = Stager(self.spool, slot_wait_s=0.2)
        return self.stagers[rank]

    def stage(
        self,
        step: int,
        states: dict[str, Any],
        *,
        rank: int = 0,
        metadata: Path | None = None,
        also: tuple[str, ...] = (),
        **other: Any,
    ) -> Staged:
        packed = pack(read_folder(metadata)) if metadata else None
        origin = self.origin(step, rank=rank, **other)
        places = group_by_node([(socket.gethostname(), str(self.spool.folder))] * self.world_size)
        write_placement(self.root, origin.run, origin.run_key, origin.role, places)
        return self.stager(rank).stage(origin, states, also=also, metadata=packed)

    def save(self, step: int, *, run: int = 1, kind: Any = "checkpoint") -> SaveId:
        where = str(self.root), run, self.key_of(run)
        return SaveId(*where, step, kind, self.roles, identity=self.identity)

    def request(self, step: int, *, run: int = 1, **other: Any) -> SaveRequest:
        """What a trainer asks the server for."""
        fields = {"run_key": self.key_of(run), "identity": self.identity}
        return SaveRequest(**{"root": str(self.root), "step": step, "run": run, **fields, **other})

    def key_of(self, run: int) -> str:
        """Key of a run that a coordinator has begun."""
        with suppress(TrinitySyncError):  # a run file that cannot be read
            return next((each.key for each in list_runs(self.root) if each.number == run), "")
        return ""

    @property
    def share(self) -> NodeShards:
        """All that is on this node."""
        ranks = tuple(range(self.world_size))
        return NodeShards("here", str(self.spool.folder), dict.fromkeys(self.roles, ranks))

    def persist(
        self, step: int, *components: str, rank_timeout_s: float = 0.05, **other: Any
    ) -> list[Written]:
        options = WriteOptions(rank_timeout_s=rank_timeout_s)
        save = self.save(step, **other)
        return [
            file
            for component in components or ("model",)
            for file in persist(self.share, save, component, options)
        ]

    def commit(self, step: int, *components: str, **other: Any) -> Manifest:
        """Persist and commit what was staged."""
        written = self.persist(step, *components, **other)
        save = self.save(step, **other)
        manifest = commit(save, written)
        free_committed_slots(self.spool, save, written)
        return manifest

    def close(self) -> None:
        """Close the stagers, as the end of a trainer does, which leaves what is not committed."""
        for stager in self.stagers.values():
            stager.close()

    def kill(self) -> None:
        """Forget the stagers, as a process that is killed, whose threads end with it."""
        for stager in self.stagers.values():
            stager.memory.close()
        self.stagers.clear()

    def commit_states(self, step: int, states: dict[str, Any], **other: Any) -> Manifest:
        """Stage the states of rank 0, and commit them."""
        self.stage(step, states, **other)
        return self.commit(step, *states, **other)


class Noted(SaveTrigger):
    """No server and no saver: keeps what is asked for, and the test says how it ends."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self.requests: list[SaveRequest] = []

    def submit(self, request: SaveRequest) -> None:
        self.requests.append(request)

    def find_failures(
        self, requests: Sequence[SaveRequest], begun: Collection[str]
    ) -> dict[str, str]:
        return {}


def mapped_nbytes(slot: Path) -> int:
    """Bytes of a slot that this process can write without a page fault."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f" {slot}\n")
    return int(re.findall(r"^Rss: +(\d+) kB", after, re.M)[0]) * 1024 if after else 0
