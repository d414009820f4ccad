"""Name the saves of a rank, and submit them to the commit watcher: what `SaveHandle` waits for."""

import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn, optim

from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.run_context import RunContext
from trinity_sync.errors import ConfigError, SaveFailedError
from trinity_sync.layout import (
    COMPONENTS,
    FOLDERS,
    KINDS,
    Kind,
    WriteConcurrency,
    check_choice,
    check_name,
    check_number,
    check_seconds,
    check_type,
)
from trinity_sync.saves.journal import Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.identity import Export, Origin, SaveId, label_run, require_root
from trinity_sync.snapshot.image import LaidOut
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.stager import Staged
from trinity_sync.snapshot.ticket import list_components
from trinity_sync.storage.placement import NodeRanks, read_placement, write_placement
from trinity_sync.storage.save_functions import write_request
from trinity_sync.tensors.dtensors import find_replicas


@dataclass(frozen=True, kw_only=True)
class SaveHandle(Staged):
    """A save: what it has put into the spool, what it cost the caller, and whether it is committed.

    The save needs no handle: it commits without one, and `CheckpointCoordinator.wait_all` raises
    its failure as well.
    """

    wait_staged: Callable[[], object] = field(repr=False)
    """Waits until an overlapped save is submitted."""
    wait_committed: Callable[[float | None], str] = field(repr=False)
    """Waits until a deadline (monotonic), and returns why the save failed."""
    has_committed: Callable[[], bool] = field(repr=False)

    @property
    def committed(self) -> bool:
        """Whether the save is committed, which one small file of the root tells."""
        if self.submitted is not None and not self.submitted.done():
            return False
        return not self._find_failure() and self.has_committed()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is committed; any thread may call it.

        Args:
            timeout: seconds from when the save is staged; None for no limit.

        Raises:
            SaveFailedError: the save was not committed; the message says why.
            SaveTimeoutError: the time is over, or the coordinator was closed; the save may still
                commit.
            ConfigError: this process is a forked child.
        """
        self.wait_staged()
        if self.committed:
            return
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        failure = self._find_failure() or self.wait_committed(deadline)
        if failure:
            raise SaveFailedError(failure)

    def _find_failure(self) -> str:
        """Return why nothing was staged; empty if it was."""
        return self.submitted.result().failure if self.submitted else self.failure


STATES = tuple(name for name in COMPONENTS if name not in {*FOLDERS, "dcp"})
"""Components that are a user's states."""
OBJECTS = (nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Of these the state is saved: a scheduler would bring its optimizer and all parameters."""


@dataclass
class SaveSubmitter:
    """Names the saves of one rank, and submits them to the commit watcher.

    ``roles`` make one checkpoint together.
    """

    root: Path
    spool: JobSpool
    run: RunContext
    rank: int
    world_size: int
    places: Sequence[NodeRanks]
    watcher: CommitWatcher
    identity: str
    roles: tuple[str, ...]
    write_concurrency: WriteConcurrency
    placed: set[str] = field(default_factory=set)
    """Roles whose placement this run has written."""
    attempts: dict[SaveId, int] = field(default_factory=dict)
    """Last attempts of the saves that were submitted more than once, by their first one."""
    monitored: dict[tuple[int, Kind], str] = field(default_factory=dict)
    """Request keys of the saves of the newest step that `submit_functions` has submitted."""

    @cached_property
    def is_first(self) -> bool:
        """Whether this is the first rank of its node."""
        return any(place.ranks[0] == self.rank for place in self.places)

    def make_origin(
        self,
        step: int,
        role: str,
        kind: Kind,
        *,
        keep: int = 0,
        export: Export = "",
        replicated: Collection[str] = (),
        replicas: Mapping[str, tuple[int, ...]] | None = None,
        again: bool = False,
    ) -> Origin:
        """Return the origin of this rank's images of a save that is submitted now.

        After the commit ``keep`` checkpoints are kept; 0 keeps all. A save that is called
        ``again`` is the next attempt if the last one has failed, which may be read from the root.

        Raises:
            ConfigError: the role cannot be part of a file name, or ``keep`` is no number.
        """
        keep = check_number(f"step {step}: keep, of which 0 keeps all steps,", keep)
        if role not in self.roles:
            check_name("role", role)
        save = self._save_id(step, kind, self.roles if kind == "checkpoint" else (role,))
        if again or (step, kind) in self.monitored:
            save = self._find_attempt(save)
        return Origin(
            **vars(save),
            role=role,
            rank=self.rank,
            world_size=self.world_size,
            keep=keep if kind == "checkpoint" else 0,
            export=export,
            write_concurrency=self.write_concurrency,
            replicated=tuple(sorted(replicated)),
            replicas=dict(replicas or {}),
        )

    def prepare(self, role: str, *, again: bool = False, starts: bool = True) -> None:
        """Have everything ready that commits a save after the death of this process.

        Rank 0 writes the placement of the role's ranks into the root, once a run, and the first
        rank of each node has the node's saver live; ``again``, a failure of that is told later.
        Unless it ``starts`` the saver, another call before the seal has to.
        """
        if self.rank == 0 and role not in self.placed:
            run = self.run.get()
            require_root(self.root, self.spool.folder.name)
            write_placement(self.root, run.number, run.key, role, self.places)
            self.placed.add(role)
        if self.is_first and starts:
            with suppress(Exception) if again else nullcontext():  # `send` tries again
                self.watcher.ensure_saver()
                self.spool.mark_run(self.run.get().key)  # a program may have removed the folder

    def check_arguments(
        self, step: int, components: Mapping[str, Any], role: str, kind: Kind, export: Export
    ) -> None:
        """Check the arguments of `CheckpointCoordinator.save`.

        Raises:
            ConfigError: there is no component or an unknown one, the kind or the export is unknown,
                or the role is not the job's; or `submit_functions` has submitted the save, which
                may be committed.
        """
        if kind not in KINDS or export not in get_args(Export):
            check_choice(f"step {step}: kind", kind, KINDS)
            check_choice(f"step {step}: export", export, get_args(Export))
        if not components or not {*STATES}.issuperset(components):  # otherwise no call, as above
            check_components(f"step {step}", components)
        if kind == "checkpoint" and role not in self.roles:
            raise ConfigError(
                f"role {role!r} is none of this job's roles {list(self.roles)}; name all roles "
                f"that make one checkpoint, e.g. TRINITY_SYNC_ROLES=actor,{role}"
            )

        key = self.monitored.get((step, kind))
        if key is not None and not self.watcher.has_failed(key):
            raise ConfigError(
                f"step {step}: register_and_monitor has submitted its {kind}, "
                "which may be committed; call save before it"
            )

    def submit_states(self, origin: Origin, staged: Staged) -> None:
        """Submit a save whose images are sealed."""
        components: Collection[str] = (*staged.components, *origin.replicas)
        if len(origin.roles) > 1:  # the first role's request counts; other roles may have more
            components = {*COMPONENTS} - {"dcp"} | {*components}
        self._ensure_saver()
        self.watcher.follow(
            self._request(origin.save, components),
            images=staged.images,
            exports=origin.role if origin.export else "",
            submit=self.rank == 0,
        )

    def submit_functions(self, step: int, kind: Kind, expected: int) -> None:
        """Submit a step of save functions, with the states that are staged for it.

        The commit expects at least ``expected`` save functions and images of all ranks together.

        Raises:
            ConfigError: the save has failed, and its states were not submitted again.
        """
        run = self.run.get()
        of_step = self.spool.read_step(self._save_id(step, kind, self.roles))
        mine = [sealed.ticket for sealed in of_step if sealed.ticket.kind == kind]
        roles = mine[0].roles if mine else self.roles
        for role in roles:
            if read_placement(self.root, run.number, run.key, role) is None:  # save functions only
                self.prepare(role)
        if self.is_first:
            self.spool.mark_run(run.key)  # a program may have removed the folder
        save = self._save_id(step, kind, roles)
        if mine:
            save = replace(save, attempt=max(ticket.attempt for ticket in mine))
            if self.watcher.has_failed(save.key):
                raise ConfigError(
                    f"step {step}: its {kind} has failed; call save again before "
                    "register_and_monitor, so that its states are saved with its functions"
                )
        else:
            save = self._find_attempt(save)
        request = self._request(save, list_components(mine), expected=expected)
        write_request(self.spool, save, request.model_dump_json())
        self.monitored = {k: v for k, v in self.monitored.items() if k[0] == step}
        self.monitored[step, kind] = request.key
        self.run.note_saved(step, self.roles, kind)
        self._ensure_saver()
        self.watcher.follow(request, submit=True)

    def _request(
        self, save: SaveId, components: Collection[str], *, expected: int = 0
    ) -> SaveRequest:
        """Return the request of a save, whose attempt is the last one from now on."""
        if save.attempt > 1:
            self.attempts[replace(save, attempt=1)] = save.attempt
        # without its checks, which take longer than all else here: the values are our own
        return SaveRequest.model_construct(
            **vars(save),
            components=tuple(filter(components.__contains__, COMPONENTS)),
            expected=expected,
        )

    def _ensure_saver(self) -> None:
        """Start the saver again if it has ended, or was killed, while the save was staged."""
        if self.is_first:
            with suppress(Exception):  # the watcher's thread tries again
                self.watcher.ensure_saver(is_submitted=True)

    def _find_attempt(self, save: SaveId) -> SaveId:
        """Return the first attempt of a save, from ``save`` on, that has not failed.

        What the other processes of the save know is read from the root: one that has not submitted
        an attempt joins them in the next.
        """
        journal = Journal(save.root, label_run(save))
        with suppress(OSError):
            journal.read()
        while True:
            entry = journal.find(save.key)
            if not (self.watcher.has_failed(save.key) or (entry and entry.has_failed)):
                return save
            save = replace(save, attempt=save.attempt + 1)

    def _save_id(self, step: int, kind: Kind, roles: tuple[str, ...]) -> SaveId:
        """Return the last attempt of a save."""
        run = self.run.get()
        root, identity = str(self.root), self.identity
        save = SaveId(root, run.number, run.key, step, kind, roles, identity=identity)
        attempt = self.attempts.get(save)
        return replace(save, attempt=attempt) if attempt else save


def check_components(
    what: str, components: Mapping[str, Any], known: Collection[str] = STATES
) -> None:
    """Require components, by name, that a save has.

    Raises:
        ConfigError: there is none, or an unknown one.
    """
    if not isinstance(components, Mapping):  # otherwise no call: a save calls this
        check_type(f"{what}: components", components, Mapping, "a dict by component, as save takes")
    others = [name for name, state in components.items() if not isinstance(state, LaidOut)]
    unknown = [str(name) for name in others if name not in known]
    if unknown or not components:
        near = difflib.get_close_matches("".join(unknown[:1]), STATES, 1)
        raise ConfigError(
            f"{what}: got the components {sorted(map(str, components))}; pass model, "
            "optim or extra_state, such as {'model': model.state_dict()}, and put everything "
            "else into extra_state" + "".join(f" ({unknown[0]}: did you mean {n}?)" for n in near)
        )


def read_states(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return components with the states of those that are objects and have one, or hold some.

    Raises:
        ConfigError: they are no dict.
    """
    if not isinstance(components, Mapping):  # otherwise no call: a save calls this
        check_type("components", components, Mapping, "a dict: {'model': model.state_dict()}")
    states = dict(components)
    for name, each in components.items():
        if hasattr(each, "state_dict"):
            states[name] = each.state_dict()
        elif isinstance(each, dict | list):
            for key, one in each.items() if isinstance(each, dict) else enumerate(each):
                if isinstance(one, OBJECTS):
                    states[name] = each.copy() if states[name] is each else states[name]
                    states[name][key] = one.state_dict()
    return states


def select_own(
    step: int, components: Mapping[str, Any], replicated: Collection[str], kind: Kind, rank: int
) -> tuple[dict[str, Any], Collection[str], dict[str, tuple[int, ...]]]:
    """Return the components that a rank saves itself, and those that are saved for several ranks.

    The latter are those that rank 0 saves for all, and the replicas of those with DTensors.

    Raises:
        ConfigError: they are not saved together with something of each rank in a checkpoint.
    """
    check_type(f"step {step}: replicated", replicated, Collection, "a tuple, such as ('model',)")
    ranks = find_replicas([components.get(name) for name in replicated], rank)
    lacking = {*replicated} - {*components} if rank == 0 else set()
    own = {name: state for name, state in components.items() if name not in replicated}
    if lacking or ("extra_state" in replicated and not own) or kind != "checkpoint":
        raise ConfigError(
            f"step {step}: got the components {sorted(components)} with replicated={replicated!r}; "
            "pass a tuple of components that rank 0 saves, in a checkpoint, and leave extra_state "
            "out of it unless each rank has another component"
        )
    own = own or {"extra_state": {}}  # it tells that this rank has called, on each node
    saved = {**components, **own} if rank == (ranks or (0,))[0] else own
    return (saved, (), dict.fromkeys(replicated, ranks)) if ranks else (saved, replicated, {})
