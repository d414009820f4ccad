"""The barrier of trainer and explorers before a broadcast, and the status of each member.

Pure state, like the version registry. A status belongs to a member and not to a count, so no
time-out and no death can make the counts wrong. A rendezvous succeeds for all members or for none;
it never changes the versions, so a failed one cannot advance them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trinity_sync.errors import ConfigError


class Status(StrEnum):
    """Trinity's ``RunningStatus``."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"

    @classmethod
    def parse(cls, value: Any) -> "Status":
        """Return the status for Trinity's enum, its value, or ours.

        Raises:
            ConfigError: there is no such status.
        """
        text = str(getattr(value, "value", value)).lower()
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(status.value for status in cls)
            raise ConfigError(f"status {value!r} is not known; pass one of {known}") from None


@dataclass
class Rendezvous:
    """One attempt of trainer and explorers to meet for a broadcast: all get the version, or none.

    It ends once; a waiting member reads ``over`` and ``version``.
    """

    step: int | None = None
    """Step that the trainer sends; None before it has arrived."""
    arrived: set[str] = field(default_factory=set)
    watched: set[str | None] = field(default_factory=set)
    """Members (None: the trainer) whose death is watched for."""
    over: bool = False
    version: int | None = None


@dataclass(frozen=True)
class Members:
    """What a restart has to know of a barrier."""

    trainer: Status = Status.STOPPED
    """As in Trinity, the trainer counts as stopped until it reports that it runs."""
    explorers: dict[str, Status] = field(default_factory=dict)
    had_trainer: bool = False
    """Whether a trainer has reported: one that has not counts as stopped, and may begin."""
    actors: frozenset[str] = frozenset()
    """Names of members, the trainer included, that are known Ray actors: a member is dead if no
    actor has its name any longer."""


class SyncBarrier:
    """Members of the weight sync: one trainer and any number of explorers; see the module."""

    def __init__(self, members: Members = Members()) -> None:
        self.trainer, self.had_trainer = members.trainer, members.had_trainer
        self.explorers = dict(members.explorers)
        self.actors = {*members.actors}
        self._rendezvous = Rendezvous()

    def set_trainer(self, status: Status) -> None:
        """Set the trainer's status; one that stops releases the explorers that wait for it."""
        self.trainer, self.had_trainer = status, True
        if status is Status.STOPPED:
            self._end(None)

    def set_explorer(self, explorer: str, status: Status) -> None:
        """Set an explorer's status, and register it if it is new.

        An explorer that stops, or is found dead, while the trainer waits makes the rendezvous fail:
        it is part of the group, and a broadcast without it would hang.
        """
        before = self.explorers.get(explorer)
        self.explorers[explorer] = status
        if status is Status.STOPPED and before is not status:
            self._rendezvous.arrived.discard(explorer)
            if self._rendezvous.step is not None:
                self._end(None)

    @property
    def live_explorers(self) -> set[str]:
        """Names of the explorers that have not stopped."""
        return {name for name, status in self.explorers.items() if status is not Status.STOPPED}

    def arrive(self, explorer: str | None, step: int | None = None) -> Rendezvous:
        """Record that an explorer, or the trainer (None), is ready for a broadcast.

        The trainer passes the step that it sends. The rendezvous is over once all members have
        arrived, or at once if there is no other member.
        """
        rendezvous = self._rendezvous
        if explorer is None:
            rendezvous.step = step
            self.set_trainer(Status.REQUIRE_SYNC)
        else:
            self.set_explorer(explorer, Status.REQUIRE_SYNC)
            rendezvous.arrived.add(explorer)
        self._end_if_decided()
        return rendezvous

    def withdraw(self, rendezvous: Rendezvous, explorer: str | None) -> None:
        """Stop waiting; without the trainer (``explorer`` is None) the rendezvous is over."""
        if rendezvous.over:
            return
        if explorer is None:
            self._end(None)
        else:
            rendezvous.arrived.discard(explorer)
            self.set_running({explorer})

    def set_running(self, explorers: set[str]) -> None:
        """Set the status of those that require a sync to running."""
        for name in explorers:
            if self.explorers.get(name) is Status.REQUIRE_SYNC:
                self.set_explorer(name, Status.RUNNING)

    def _end_if_decided(self) -> None:
        rendezvous, live = self._rendezvous, self.live_explorers
        if rendezvous.step is None:
            if rendezvous.arrived and self.trainer is Status.STOPPED:
                self._end(None)
        elif not live:
            self._end(None)
        elif live <= rendezvous.arrived:
            self._end(rendezvous.step)

    def _end(self, version: int | None) -> None:
        rendezvous, self._rendezvous = self._rendezvous, Rendezvous()
        rendezvous.over, rendezvous.version = True, version
        if rendezvous.step is not None and self.trainer is Status.REQUIRE_SYNC:
            self.set_trainer(Status.RUNNING)
        self.set_running(rendezvous.arrived)

    @property
    def members(self) -> Members:
        """Trainer and explorers, without waits, whose calls a restart repeats."""
        status = {Status.REQUIRE_SYNC: Status.RUNNING}
        explorers = {name: status.get(each, each) for name, each in self.explorers.items()}
        trainer, actors = status.get(self.trainer, self.trainer), frozenset(self.actors)
        return Members(trainer, explorers, self.had_trainer, actors)


@dataclass(frozen=True)
class SyncSettings:
    """Names and time limits; `from_config` reads them from Trinity's config."""

    timeout_s: float = 3600.0
    """Trinity's ``sync_timeout``: seconds to wait, unless the call passes a time-out."""
    role: str = "actor"
    """Role of the weights: the folder under ``global_step_N/``."""
    trainer: str = "trainer"
    """Name of the trainer's Ray actor, for the rendezvous and the group of a broadcast."""
    explorer: str = "explorer"
    """Name of the explorer if a call passes none, as Trinity's calls do."""
    explorer_world_size: int = 1
    """Workers of one explorer that join the group of a broadcast."""
    group: str = "rollout_weight_sync"
    """Name of the process group of a broadcast."""

    @classmethod
    def from_config(cls, config: Any) -> "SyncSettings":
        """Return the settings of a Trinity config; missing values get the defaults."""
        sync = getattr(config, "synchronizer", None)
        ours = cls()
        return cls(
            timeout_s=float(getattr(sync, "sync_timeout", None) or ours.timeout_s),
            trainer=getattr(getattr(config, "trainer", None), "name", None) or ours.trainer,
            explorer=getattr(getattr(config, "explorer", None), "name", None) or ours.explorer,
            explorer_world_size=getattr(sync, "explorer_world_size", None) or 1,
            group=getattr(sync, "group_name", None) or ours.group,
        )
