"""Trainer and explorers: what each is doing, and the handshake before a broadcast.

Pure state, like the version registry. A status belongs to an explorer and not to a count, so no
time-out and no death can make the counts wrong. A handshake succeeds for all parties or for none;
it never touches the versions, so one that fails cannot advance them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trinity_sync.errors import ConfigError


class Status(str, Enum):
    """Trinity's ``RunningStatus``."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"

    @classmethod
    def of(cls, value: Any) -> "Status":
        """Ours for Trinity's enum, its value, or ours.

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
class Handshake:
    """One attempt of trainer and explorers to meet for a broadcast: all get the version, or none.

    It ends once. A party that has been told neither yet looks at ``over`` and ``version``.
    """

    step: int | None = None
    """What the trainer wants to send, once it has arrived."""
    arrived: set[str] = field(default_factory=set)
    watched: set[str | None] = field(default_factory=set)
    """Parties (None: the trainer) whose death would be noticed."""
    over: bool = False
    version: int | None = None

    def end(self, version: int | None) -> None:
        """Let all who wait go, with the version or with None."""
        self.over, self.version = True, version


class Parties:
    """See the module. ``changes`` counts all that `to_json` shows."""

    def __init__(self) -> None:
        self.trainer = Status.STOPPED
        """As in Trinity, a trainer that has not said that it runs counts as stopped."""
        self.explorers: dict[str, Status] = {}
        self.actors: set[str] = set()
        """Names of those, the trainer among them, that were seen to be Ray actors."""
        self._handshake = Handshake()
        self.changes = 0

    def note_actor(self, name: str) -> None:
        """That party is a Ray actor: if there is none of its name any more, it is dead."""
        self.changes += name not in self.actors
        self.actors.add(name)

    def set_trainer(self, status: Status) -> None:
        """The trainer's status; one that stops lets explorers go that wait for it."""
        self.changes += _at_rest(status) is not _at_rest(self.trainer)
        self.trainer = status
        if status is Status.STOPPED:
            self._end(None)

    def set_explorer(self, explorer: str, status: Status) -> None:
        """An explorer's status, which also registers it.

        One that stops, or is found dead, while the trainer waits in a handshake makes that fail: it
        was part of the group, and a broadcast without it would hang.
        """
        before = self.explorers.get(explorer)
        self.changes += before is None or _at_rest(before) is not _at_rest(status)
        self.explorers[explorer] = status
        if status is Status.STOPPED and before is not status:
            self._handshake.arrived.discard(explorer)
            if self._handshake.step is not None:
                self._end(None)

    @property
    def counts(self) -> Counter[Status]:
        """How many explorers have each status."""
        return Counter(self.explorers.values())

    @property
    def live_explorers(self) -> set[str]:
        """Those that have not stopped."""
        return {name for name, status in self.explorers.items() if status is not Status.STOPPED}

    def arrive(self, explorer: str | None, step: int | None = None) -> Handshake:
        """The trainer (None) with the ``step`` that it will send, or an explorer, is ready.

        The handshake that is returned is over when all have arrived, or when it cannot come to be:
        nobody is there to meet.
        """
        shake = self._handshake
        if explorer is None:
            shake.step = step
            self.set_trainer(Status.REQUIRE_SYNC)
        else:
            self.set_explorer(explorer, Status.REQUIRE_SYNC)
            shake.arrived.add(explorer)
        self._settle()
        return shake

    def withdraw(self, shake: Handshake, explorer: str | None) -> None:
        """A party waits no longer. Without the trainer (None) nobody has anything to wait for."""
        if shake.over:
            return
        if explorer is None:
            self._end(None)
        else:
            shake.arrived.discard(explorer)
            self.back_to_work({explorer})

    def back_to_work(self, explorers: set[str]) -> None:
        """Those of them that required a sync run again."""
        for name in explorers:
            if self.explorers.get(name) is Status.REQUIRE_SYNC:
                self.set_explorer(name, Status.RUNNING)

    def _settle(self) -> None:
        shake, live = self._handshake, self.live_explorers
        if shake.step is None:
            if shake.arrived and self.trainer is Status.STOPPED:
                self._end(None)
        elif not live:
            self._end(None)
        elif live <= shake.arrived:
            self._end(shake.step)

    def _end(self, version: int | None) -> None:
        shake, self._handshake = self._handshake, Handshake()
        shake.end(version)
        if shake.step is not None and self.trainer is Status.REQUIRE_SYNC:
            self.set_trainer(Status.RUNNING)
        self.back_to_work(shake.arrived)

    def to_json(self) -> dict[str, Any]:
        """All but who requires a sync just now: whoever does asks again."""
        return {
            "trainer": _at_rest(self.trainer).value,
            "explorers": {name: _at_rest(each).value for name, each in self.explorers.items()},
            "actors": sorted(self.actors),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Parties":
        """What `to_json` gave.

        Raises:
            KeyError, ValueError: it is something else.
        """
        parties = cls()
        parties.trainer = Status(body["trainer"])
        parties.explorers = {name: Status(status) for name, status in body["explorers"].items()}
        parties.actors = set(body.get("actors", ()))
        return parties


def _at_rest(status: Status) -> Status:
    return Status.RUNNING if status is Status.REQUIRE_SYNC else status
