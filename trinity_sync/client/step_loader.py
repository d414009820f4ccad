"""Find and load the step that a run resumes from, by one rank or by all ranks together."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trinity_sync.client.collective import broadcast_from_rank_0, lease_on_rank_0, run_on_all_ranks
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.run_context import RunContext
from trinity_sync.errors import ConfigError
from trinity_sync.fs.atomic import ReadOnChange, lengthen_pauses, list_paths
from trinity_sync.layout import KINDS, Kind, check_choice, job_id_of, step_folder
from trinity_sync.snapshot.identity import explain_away, read_identity
from trinity_sync.snapshot.spool import JobSpool, list_job_spools
from trinity_sync.snapshot.stager import Stager
from trinity_sync.storage.discovery import find_newest, require_whole, warn_of_other_step
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.placement import NodeRanks
from trinity_sync.storage.restore import fill_states, open_states
from trinity_sync.storage.save_functions import list_requests
from trinity_sync.storage.steps_in_use import lease_to_read, resolve_step
from trinity_sync.tensors.dtensors import adopt_meshes

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class StepLoader:
    """Finds and loads the committed steps of a job for one rank."""

    root: Path
    spool: JobSpool
    run: RunContext
    rank: int
    world_size: int
    places: Sequence[NodeRanks]
    watcher: CommitWatcher
    stager: Stager
    roles: set[str] = field(default_factory=set)
    """Roles that this process has loaded; others may be those of other processes."""
    is_collective: bool = False
    """Whether all ranks of the default process group find and load steps together."""
    unread: dict[str, set[str]] = field(default_factory=dict)
    """Components of the step that no call has loaded, by role."""

    def latest_step(self, kind: Kind, settle_s: float, healthy: bool) -> int | None:
        """As `CheckpointCoordinator.latest_step`."""
        check_choice("kind", kind, KINDS)

        def find() -> int | None:
            manifest = find_newest(self.root, kind, healthy=healthy)
            if manifest and kind == "checkpoint" and not healthy:
                warn_of_other_step(self.root, manifest.step)
            return manifest.step if manifest else None

        return self._find(find, settle_s)

    def resolve(self, step: int | str) -> int:
        """As `resolve_step`; a text once saves in flight are committed."""
        find = partial(resolve_step, self.root, step)
        return self._find(find) if isinstance(step, str) else find()

    def _find(self, find: Callable[[], T], settle_s: float = 60.0) -> T:
        if not self._asks_together:
            self._settle(settle_s)
            return find()
        leads_node = self.rank in {place.ranks[0] for place in self.places}
        run_on_all_ranks(self.root, lambda: self._settle(settle_s if leads_node else 0.0))
        return broadcast_from_rank_0(self.root, find)

    def load(
        self, step: int, role: str, only: Sequence[str], live: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """As `CheckpointCoordinator.load`, or with ``live`` as its `load_into`."""
        with self.open(step, role, live or {}, only=only, borrow=False) as states:
            return states

    @contextmanager
    def open(
        self,
        step: int,
        role: str,
        live: Mapping[str, Any],
        *,
        only: Sequence[str] = (),
        borrow: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """As `CheckpointCoordinator.open`; ``live`` is filled, and the rest borrowed or loaded.

        ``only`` is as in `CheckpointCoordinator.load`.
        """
        if self._asks_together:
            lease = lease_on_rank_0(self.root, step)
        else:
            lease = lease_to_read(self.root, step, f"load by rank {self.rank}")
        own: Any = {"rank": self.rank, "world_size": self.world_size, "spool": self.spool}
        own["only"] = only
        together = partial(self._run_together, step)
        with ExitStack() as opened:
            with lease as manifest:
                if not only:
                    require_whole(self.root, manifest)
                inner = [n for n, each in live.items() if not hasattr(each, "load_state_dict")]
                rest = open_states(
                    self.root, step, role, manifest=manifest, besides=inner, borrow=borrow, **own
                )
                others = together(lambda: opened.enter_context(rest))
                adopt_meshes(others, live)
                together(lambda: _require_same_groups(live, others))
                own["run_together"] = together
                states = fill_states(self.root, manifest, role, live, **own) | others
                together(lambda: _restore(live, states))
                unread = self.unread.setdefault(role, manifest.list_components(role))
                unread.difference_update(states)
                # from here on, retention spares the step for this run
                self.begin_at(step, {role: unread if only else ()})
            yield states
        self.roles.add(role)
        self.prewarm_as(step, manifest)

    def require_can_begin_at(self, step: int, wait: Callable[[], object], *, whole: bool) -> None:
        """As `CheckpointCoordinator.check_resume`, after a call of ``wait``.

        The ranks have one key, so rank 0 looks at the runs in the root for all.
        """

        def check() -> None:
            wait()
            if self.rank and self._asks_together:
                self.run.has_begun_at(step)
            else:
                self.run.require_can_begin_at(step)
                if whole:
                    require_whole(self.root, read_manifest(self.root, step, ranks=()))

        self._run_together(step, check)

    def begin_at(self, step: int, left_out: Mapping[str, Collection[str]] = {}) -> None:
        """Begin the run at a step; rank 0 begins it for all. ``left_out`` is as in `RunContext`."""
        self.run.join(self.run_on_rank_0(step, lambda: self.run.begin_at(step, left_out)))

    def prewarm_as(self, step: int, manifest: Manifest | None = None) -> None:
        """Do as `CheckpointCoordinator.prewarm`, for images as large as this rank's of a step.

        Those of the roles that it has loaded, or of all if other code has loaded them.
        """

        def find() -> list[tuple[str, str, int, int]]:
            found = manifest or read_manifest(self.root, step, ranks=[self.rank])
            own = self.rank, self.world_size
            images = [
                (each.role, each.component, each.rank, each.nbytes)
                for each in (found.files if found else ())
                if each.is_shard and (each.rank, each.world_size) == own
                if each.role in self.roles or not self.roles
            ]
            self.stager.require_room(sum(nbytes for *_, nbytes in images))
            return images

        self.stager.memory.map_slots(find)
        self.watcher.start_saver()

    def run_on_rank_0(self, step: int, work: Callable[[], T]) -> T:
        """Return what a function returns on rank 0 alone, or here if the ranks ask separately."""
        if self._asks_together:
            return broadcast_from_rank_0(step_folder(self.root, step), work)
        return work()

    @property
    def _asks_together(self) -> bool:
        return self.is_collective and dist.is_initialized()

    def _run_together(self, step: int, work: Callable[[], T]) -> T:
        """Run a function; if the ranks ask together, its error on one is raised on all."""
        if self._asks_together:
            return run_on_all_ranks(step_folder(self.root, step), work)
        return work()

    def _settle(self, seconds: float) -> None:
        """Wait until no save of an earlier run is in flight in this node's spool.

        After some seconds, log that some are. A run that has begun has superseded them.
        """
        if not seconds or self.run.has_begun():
            return
        deadline = time.monotonic() + seconds
        spools, pauses = _list_spools(self.root, self.spool), lengthen_pauses()
        tickets = [ReadOnChange(spool.folder, spool.tickets) for spool in spools]
        begun = False
        while steps := {
            *(one.ticket.step for each in tickets for one in each.get()[0] if not one.failed),
            *(int(path.name.split(".")[1]) for each in spools for path in list_requests(each)),
        }:
            if time.monotonic() >= deadline:
                logger.warning(
                    "Saves of an earlier run of %s (steps %s) are still not committed after %g s: "
                    "resuming from an earlier step supersedes them. To wait for longer, end this "
                    "run and pass a longer settle_s",
                    self.root,
                    ", ".join(map(str, sorted(steps))),
                    seconds,
                )
                return
            if not begun:
                self.watcher.ensure_saver()  # what commits them
                self.watcher.hurry()
            begun = True
            time.sleep(next(pauses))


def _list_spools(root: Path, own: JobSpool) -> list[JobSpool]:
    """List a job's folder in the spool, and those of other paths to its root: a mount, a link."""
    spools = [own]
    alone = list_paths(own.folder.parent, "*-*") == [own.folder]
    for other in () if alone else list_job_spools(own.folder.parent):
        of, name = other.read_root(), other.folder.name
        if of not in (None, root) and name == job_id_of(of, read_identity(root)):
            spools += [] if explain_away(of, name) else [other]
    return spools


def _require_same_groups(live: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Refuse what an optimizer would, before anything is changed."""
    for name, each in live.items():
        if not isinstance(each, torch.optim.Optimizer) or name not in states:
            continue
        both = each.param_groups, states[name].get("param_groups", ())
        here, saved = ([len(group["params"]) for group in groups] for groups in both)
        if here != saved:
            raise ConfigError(
                f"{name} has parameter groups of {here} tensors, and in the step of {saved}. "
                "Nothing was changed. Make the optimizer as it was saved, or leave it out"
            )


def _restore(live: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give objects that have a method for it their states."""
    for name, each in live.items():
        if hasattr(each, "load_state_dict"):
            each.load_state_dict(states[name])
