"""`RolloutLedger`: which rollouts were issued, finished, trained and dropped."""

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch

from trinity_sync.errors import ConfigError
from trinity_sync.fs.process import hold_handlers
from trinity_sync.fs.records import describe
from trinity_sync.layout import check_number

Id = int | str
Versions = Sequence[tuple[int, int, int]]
"""Of the tokens of a rollout, in their order: step of the weights, first and last token of it."""
State = Literal["issued", "finished", "trained", "dropped"]

_STATES: tuple[State, ...] = get_args(State)
_LENGTH = np.dtype("<u4")
"""Of an entry in the log, before the entry."""


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """Rollouts that came into a state."""

    state: State
    places: list[int] = []
    """Of the rollouts in the order of their issue."""
    step: int = 0
    new: list[Id] = []
    """Rollouts that were issued for the first time; they have the next places."""
    versions: list[list[tuple[int, int, int]]] = []
    """Of the rollout at each place, if they are known."""


class RolloutLedger:
    """Counts each rollout of a training: issued, finished, trained or dropped.

    Saved with the steps of the training, it makes a resume exact, whatever was in flight: **each
    rollout is trained exactly once, and generated at least once**. It schedules nothing.

    It lives in one process, such as the controller, and any of its threads may call it. A rollout
    has an id that is unique in the whole training, a number or a text, such as the epoch times the
    size of the dataset plus the index. What is saved is a log that only grows, by some 10 to 20
    bytes for a numbered rollout; a save copies it as one tensor.

    Example::

        ledger = RolloutLedger()
        ledger.issue([17, 18])                       # before they are generated
        queue.put(rollout for rollout in done if rollout.id in ledger.finish([rollout.id]))
        ledger.train([17], step=4)                   # once the optimizer has used it
        part.save(4, {"ledger": ledger.state_dict(), "queue": queue.state()})

        # in the next run
        ledger.load_state_dict(part.load(4)["ledger"], step=4)
        again = ledger.resume(held=queue.ids())      # generate these again
        queue.keep_only(ledger.to_train())
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may save it: the log grows at once
        self._clear()

    def issue(self, ids: Iterable[Id]) -> None:
        """Record that the generation of rollouts begins.

        Raises:
            ConfigError: a rollout was issued before, or its id is neither an int of 64 bits nor a
                str in UTF-8; nothing is recorded.
        """
        new = list(ids)
        if bad := [each for each in new if type(each) not in (int, str)]:
            raise ConfigError(
                f"rollout {bad[0]!r} is a {type(bad[0]).__name__}, which a saved state would not "
                "have again; use its int() or str()"
            )
        with self._lock:
            if known := [each for each in new if each in self._places] or _find_doubles(new):
                raise ConfigError(
                    f"rollouts {known[:5]} were issued before or come twice; give each an id of "
                    "its own"
                )
            self._record(_Entry("issued", new=new))

    def finish(self, ids: Iterable[Id], versions: Mapping[Id, Versions] | None = None) -> list[Id]:
        """Record that rollouts were generated, and return those that are new, in their order.

        One that was generated twice, since it was issued again, is new the first time only.

        Args:
            ids: the rollouts.
            versions: which weights made which tokens of a rollout, for `ages`: steps of the weights
                with the first and the last token of each, from 0, in the order of the tokens.

        Raises:
            ConfigError: a rollout was never issued, or its versions do not name each token once;
                nothing is recorded.
        """
        found: dict[Id, list[tuple[int, int, int]]] = {}
        for each, spans in (versions or {}).items():
            with suppress(TypeError, ValueError):  # what a saved state would not have again
                found[each] = msgspec.convert([*spans], list[tuple[int, int, int]])
            ends = [-1, *(last for _, _, last in found.get(each, ()))]
            if each not in found or any(
                step < 0 or not before + 1 == first <= last
                for before, (step, first, last) in zip(ends, found[each], strict=False)
            ):
                raise ConfigError(
                    f"versions {spans} of rollout {each!r} do not name each token once; pass "
                    "ints (step, first token, last token) of each version, in the tokens' order"
                )
        return self._move("finished", ids, {"issued"}, found)

    def train(self, ids: Iterable[Id], step: int) -> None:
        """Record that the optimizer step ``step`` has used rollouts.

        Raises:
            ConfigError: a rollout was never issued, was trained or dropped before, or comes twice;
                nothing is recorded.
        """
        trained, step = list(ids), check_number("step", step)
        with self._lock:
            places = self._find(trained)
            if doubles := _find_doubles(trained):
                raise ConfigError(f"rollouts {doubles[:5]} come twice in step {step}")
            for each, place in zip(trained, places, strict=True):
                if (state := self._states[place]) in ("trained", "dropped"):
                    at = f" at step {self._steps[place]}" if state == "trained" else ""
                    raise ConfigError(
                        f"rollout {each!r} cannot be trained at step {step}: it was {state}{at}"
                    )
            self._record(_Entry("trained", places, step))

    def drop(self, ids: Iterable[Id]) -> list[Id]:
        """Record that rollouts will not be trained, and return those that were not trained before.

        Raises:
            ConfigError: a rollout was never issued; nothing is recorded.
        """
        return self._move("dropped", ids, {"issued", "finished"})

    def resume(self, held: Iterable[Id]) -> list[Id]:
        """Return the rollouts to generate again after `load_state_dict`, in the order of issue.

        They are those that are neither trained nor dropped nor held. Afterwards `to_train` has the
        others; anything else that is held was trained, or is issued again by the loaded cursor, and
        has to be removed.

        Args:
            held: ids of the rollouts that the restored queue or buffer has.
        """
        with self._lock:
            there = {self._places[each] for each in held if each in self._places}
            lost = [place for place in self._list({"finished"}) if place not in there]
            found = [place for place in self._list({"issued"}) if place in there]
            self._record(_Entry("issued", lost))
            self._record(_Entry("finished", found))
            return [self._ids[place] for place in self._list({"issued"})]

    def to_issue(self) -> list[Id]:
        """Return the rollouts that were issued and have not finished, in the order of issue."""
        with self._lock:
            return [self._ids[place] for place in self._list({"issued"})]

    def to_train(self) -> list[Id]:
        """Return the rollouts that are finished and neither trained nor dropped, in that order."""
        with self._lock:
            return [self._ids[place] for place in self._list({"finished"})]

    def step_of(self, rollout: Id) -> int | None:
        """Return the step that trained a rollout; None if none has.

        Raises:
            ConfigError: it was never issued.
        """
        with self._lock:
            (place,) = self._find([rollout])
            return self._steps[place] if self._states[place] == "trained" else None

    def ages(self, step: int) -> dict[int, int]:
        """Return the numbers of tokens that a step has trained, by the age of their weights.

        The age is in trainer steps; that of weights beyond the step, which a later run has
        superseded, is 0. Tokens of which `finish` got no version are not counted.
        """
        with self._lock:
            return dict(sorted(self._ages.get(step, {}).items()))

    def count(self) -> dict[State, int]:
        """Return the number of rollouts in each state."""
        with self._lock:
            return {state: self._states.count(state) for state in _STATES}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what `load_state_dict` needs, without a copy; later events do not change it."""
        with self._lock:
            return {"log": torch.from_numpy(self._log[: self._used])}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue with the rollouts of a saved state, at a step of the training.

        Rollouts that were trained after the step count as finished.

        Raises:
            ConfigError: it is no state of a ledger.
        """
        with hold_handlers(), self._lock:
            self._clear()
            try:
                log, at = memoryview(state["log"].numpy()), 0
                while at < len(log):
                    begin = at + _LENGTH.itemsize
                    at = begin + int(np.frombuffer(log[at:begin], _LENGTH)[0])
                    entry = msgspec.msgpack.decode(log[begin:at], type=describe(_Entry))
                    if entry.step <= step:
                        self._record(entry)
            except (LookupError, AttributeError, ValueError) as error:
                self._clear()
                raise ConfigError(f"this is not the state of a RolloutLedger: {error}") from error

    def _clear(self) -> None:
        self._ids: list[Id] = []
        self._places: dict[Id, int] = {}
        self._states: list[State] = []
        self._steps = array("q")
        self._open: dict[int, None] = {}
        """Places of the rollouts that are issued or finished."""
        self._versions: dict[int, Versions] = {}
        """By place, of rollouts that are finished."""
        self._ages: dict[int, Counter[int]] = {}
        self._log = np.empty(1 << 16, dtype=np.uint8)
        self._used = 0

    def _find(self, ids: Iterable[Id]) -> list[int]:
        try:
            return [self._places[each] for each in ids]
        except KeyError as error:
            raise ConfigError(f"rollout {error.args[0]!r} was never issued") from None

    def _list(self, states: set[State]) -> list[int]:
        return sorted(place for place in self._open if self._states[place] in states)

    def _move(
        self,
        state: State,
        ids: Iterable[Id],
        before: set[State],
        versions: Mapping[Id, Any] | None = None,
    ) -> list[Id]:
        """Move rollouts that are in one of the states before, and return them."""
        with self._lock:
            found = dict.fromkeys(self._find(ids))
            places = [place for place in found if self._states[place] in before]
            moved = [self._ids[place] for place in places]
            known = [versions.get(each, []) for each in moved] if versions else []
            self._record(_Entry(state, places, versions=known))
            return moved

    def _record(self, entry: _Entry) -> None:
        try:
            encoded = msgspec.msgpack.encode(entry)  # first: it refuses an int of more than 64 bits
        except (OverflowError, ValueError) as error:
            raise ConfigError(f"an id or version of a rollout cannot be saved: {error}") from error
        first = len(self._ids)
        self._ids += entry.new
        self._places.update((each, first + place) for place, each in enumerate(entry.new))
        self._states += [entry.state] * len(entry.new)
        self._steps.extend([0] * len(entry.new))
        places = entry.places or range(first, len(self._ids))
        if not places:
            return
        for place, versions in zip_longest(places, entry.versions):
            known = self._versions.pop(place, ())
            if entry.state == "trained":
                ages = self._ages.setdefault(entry.step, Counter())
                for step, first, last in known:
                    ages[max(0, entry.step - step)] += last - first + 1
            elif versions:
                self._versions[place] = versions
            self._states[place], self._steps[place] = entry.state, entry.step
            if entry.state in ("issued", "finished"):
                self._open[place] = None
            else:
                self._open.pop(place, None)
        content = np.array([len(encoded)], _LENGTH).tobytes() + encoded
        end = self._used + len(content)
        if end > len(self._log):  # views of the old array stay as they are
            larger = np.empty(2 * end, dtype=np.uint8)
            larger[: self._used] = self._log[: self._used]
            self._log = larger
        self._log[self._used : end] = np.frombuffer(content, np.uint8)
        self._used = end


def _find_doubles(ids: list[Id]) -> list[Id]:
    return [each for each, count in Counter(ids).items() if count > 1]
