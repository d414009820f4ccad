"""Which versions there are, and who serves which.

Pure state: no Ray, no asyncio, no clock (times come in as ``now``, seconds since the epoch), so
that every rule can be tested as a table. Two rules hold whatever comes, in whatever order:

- versions are ordered by (run, step), and the newest never moves backwards;
- what a later run left behind, by resuming from before it, is gone and does not come back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trinity_sync.storage.runs import Run, left_behind_by
from trinity_sync.weights.version import ImageRef, Source, Version

HISTORY = 8
"""Versions that are kept, besides the newest of each source: what a reader may fall back to."""
MOST_READERS = 1024
"""Readers that are kept; of more, those that were not heard of for longest are forgotten."""
PREFERENCE: tuple[Source, ...] = ("memory", "checkpoint", "nccl")
"""Of one step's sources: shared memory is quickest, a broadcast is over for who missed it."""

Key = tuple[int, int]
"""(run, step): a later run counts as newer, because it went on from an earlier step on purpose."""


@dataclass(frozen=True)
class Reader:
    """What one reader of the weights serves, as of the newest version."""

    name: str
    step: int
    run: int
    since: float
    """When it began to serve that step."""
    behind: int
    """Steps to the newest version, from what it serves or from where a resume left that behind."""
    stale_s: float
    """Seconds since there has been something newer than what it serves; 0 if there is nothing."""


@dataclass(frozen=True)
class _Serving:
    step: int
    run: int
    since: float
    heard: float
    outdated: float | None
    """Since when there has been something newer."""


class Book:
    """See the module."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        """All that are known, by number."""
        self._versions: dict[Key, dict[Source, Version]] = {}
        self._known_at: dict[Key, float] = {}
        self._serving: dict[str, _Serving] = {}
        self.changes = 0
        """Counts all that `to_json` shows, so that a writer knows when to write."""

    # Versions

    def record(self, version: Version, now: float) -> bool:
        """Note a version, or one more source of it; whether it is the newest one now.

        False too for what a later run has left behind, which is not noted.
        """
        key = (version.run, version.step)
        if self.abandoned(*key):
            return False
        self._versions.setdefault(key, {})[version.source] = version
        self._known_at.setdefault(key, now)
        self._forget_old()
        for name, serving in self._serving.items():
            if serving.outdated is None and (serving.run, serving.step) < key:
                self._serving[name] = replace(serving, outdated=now)
        self.changes += 1
        return key == max(self._versions)

    def begin_runs(self, runs: Iterable[Run]) -> bool:
        """Learn of runs; whether any was new.

        What they left behind is dropped. Runs that are known and not in ``runs`` stay.
        """
        known = len(self.runs)
        self.runs |= {run.number: run for run in runs}
        if len(self.runs) == known:
            return False
        for key in [key for key in self._versions if self.abandoned(*key)]:
            self._forget(key)
        self.changes += 1
        return True

    def abandoned(self, run: int, step: int) -> bool:
        """Whether a later run left this step behind."""
        return left_behind_by(self.runs.values(), run, step) is not None

    def newest(self, source: Source | None = None, *, readable: bool = False) -> Version | None:
        """The newest version, by its best source, or the newest that has ``source``.

        With ``readable``, the newest of those that readers can have.
        """
        for _, found in sorted(self._versions.items(), reverse=True):
            for each in (source,) if source else PREFERENCE:
                if each in found and (found[each].readable or not readable):
                    return found[each]
        return None

    def find(self, step: int, source: Source) -> Version | None:
        """The version of a step that is to be had from ``source``; that of the last such run."""
        keys = [key for key, found in self._versions.items() if key[1] == step and source in found]
        return self._versions[max(keys)][source] if keys else None

    def newer(self, than: int, run: int | None = None, *, readable: bool = False) -> Version | None:
        """The newest version, if it is newer than step ``than`` (of ``run``), else None.

        Without ``run``, a step beyond the newest one counts as older if the run that began last
        made the newest: it has not come so far, so whoever serves that step holds what an earlier
        run made and training has left. Only with ``run`` is the same step of a later run newer.
        """
        newest = self.newest(readable=readable)
        if newest is None:
            return None
        if run is not None:
            return newest if (newest.run, newest.step) > (run, than) else None
        resumed = newest.run == self.run > 1
        return newest if newest.step > than or (resumed and newest.step < than) else None

    @property
    def run(self) -> int:
        """The run that began last; 1 if none is known."""
        return max([1, *self.runs, *(run for run, _ in self._versions)])

    # Readers

    def serve(self, reader: str, step: int, now: float, run: int | None = None) -> None:
        """Note that ``reader`` serves a version; without ``run``, that of the newest such step."""
        if run is None:
            made_by = [r for r, s in self._versions if s == step]
            run = max(made_by, default=self.run)
        before = self._serving.get(reader)
        same = before is not None and (before.run, before.step) == (run, step)
        if before and same:
            self._serving[reader] = replace(before, heard=now)
        else:
            newer_at = [at for key, at in self._known_at.items() if key > (run, step)]
            outdated = min(newer_at, default=None)
            self._serving[reader] = _Serving(step, run, now, now, outdated)
        while len(self._serving) > MOST_READERS:
            del self._serving[min(self._serving, key=lambda name: self._serving[name].heard)]
        self.changes += not same

    def leave(self, reader: str) -> None:
        """Forget a reader that serves no more."""
        if self._serving.pop(reader, None):
            self.changes += 1

    def readers(self, now: float) -> tuple[Reader, ...]:
        """All readers, by name."""
        newest = max(self._versions, default=None)
        found = []
        for name, serving in sorted(self._serving.items()):
            left = left_behind_by(self.runs.values(), serving.run, serving.step)
            common = min(serving.step, left.resumed_from) if left else serving.step
            behind = max(0, newest[1] - common) if newest else 0
            stale_s = 0.0 if serving.outdated is None else max(0.0, now - serving.outdated)
            found.append(Reader(name, serving.step, serving.run, serving.since, behind, stale_s))
        return tuple(found)

    # What outlives the process

    def to_json(self) -> dict[str, Any]:
        """The whole book."""
        return {
            "runs": [asdict(run) for run in self.runs.values()],
            "versions": [
                {**asdict(version), "known_at": self._known_at[key]}
                for key, sources in sorted(self._versions.items())
                for version in sources.values()
            ],
            "readers": {name: asdict(serving) for name, serving in self._serving.items()},
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Book":
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        book = cls()
        book.begin_runs(Run(**run) for run in body["runs"])
        for saved in body["versions"]:
            fields = dict(saved)
            now = float(fields.pop("known_at"))
            fields["images"] = tuple(ImageRef(**image) for image in fields["images"])
            book.record(Version(**fields), now)
        book._serving = {name: _Serving(**serving) for name, serving in body["readers"].items()}
        return book

    def _forget_old(self) -> None:
        best = (self.newest(source) for source in PREFERENCE)
        keep = {(version.run, version.step) for version in best if version}
        keep |= set(sorted(self._versions)[-HISTORY:])
        for key in self._versions.keys() - keep:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        del self._versions[key], self._known_at[key]
