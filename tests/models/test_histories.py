"""Random histories of saves, crashes, resumes, rewinds, claims, repairs and retentions, next
to a model of a few sets.

Whatever happened, the newest commit loads with its own state, what is claimed is there, what a
policy keeps is there, the iteration files name steps that are whole, and nothing comes back from
before a rewind. ``HISTORIES`` is how many histories are tried.
"""

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.conftest import SPOOLS
from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.leases import HeldLease, acquire_lease
from trinity_sync.errors import SaveError, StepInUseError, SupersededError
from trinity_sync.layout import KINDS, SERVES_AS, Kind
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.discovery import find_newest, iter_committed_steps, require_committed
from trinity_sync.storage.gc import FILE_REPAIRS
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.pins import pin, unpin
from trinity_sync.storage.quarantine import rewind
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.save import mark_failed

LASTS = st.integers(1, 4)
MULTIPLES = st.integers(2, 4)
KIND = st.sampled_from(KINDS)


class Histories(RuleBasedStateMachine):
    """One job; ``self.steps`` is what the model says is committed: run, kind and value."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
        root = self.folder / "ckpts"
        root.mkdir()
        self.job = Job(root, open_job_spool(self.folder / "spool", root))
        self.run, self.step, self.value = 1, 0, 0.0
        self.lines: dict[int, dict[int, float]] = {1: {1: math.inf}}
        """What each run continues: its last step of each earlier run, and all of its own."""
        self.steps: dict[int, tuple[int, Kind, float]] = {}
        self.crashed: set[int] = set()
        self.pinned: set[int] = set()
        self.leased: dict[int, HeldLease] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        open_run(self.job.root, "1", 0)

    def _stage(self, kind: Kind) -> dict[str, Any]:
        self.step += 1
        self.value += 1
        other = {"run": self.run, "kind": kind}
        self.job.stage(self.step, {"model": {"w": torch.full((3,), self.value)}}, **other)
        return other

    @rule(kind=KIND)
    def save(self, kind: Kind) -> None:
        other = self._stage(kind)
        if kind == "state_dict" and self.steps.get(self.step, (0,))[0] != self.run:
            there = self.steps.get(self.step)
            kept = self.pinned | {self._newest("checkpoint")}
            if there and there[1] == "checkpoint" and self.step in kept:
                with pytest.raises(SaveError, match=r"would replace the (newest )?checkpoint"):
                    self.job.commit(self.step, **other)
                mark_failed(self.job.spool, self.job.save(self.step, **other), "it was refused")
                return
        self.job.commit(self.step, **other)
        self.steps[self.step] = (self.run, kind, self.value)
        self.crashed.discard(self.step)

    @rule(kind=KIND)
    def save_that_dies_in_the_middle(self, kind: Kind) -> None:
        other = self._stage(kind)
        self.job.persist(self.step, **other)
        mark_failed(self.job.spool, self.job.save(self.step, **other), "its process died")
        self.crashed.add(self.step)

    @precondition(lambda self: self._by_age("checkpoint"))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.step = data.draw(st.sampled_from(self._by_age("checkpoint")))
        self._begin_run()

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), in_flight=st.booleans(), moment=st.integers(0, 8))
    def go_back(self, data: st.DataObject, in_flight: bool, moment: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        run, kind, _ = self.steps[step]
        newer = {other for other, known in self.steps.items() if other > step or known[0] > run}
        if newer & set(self.leased):
            with pytest.raises(StepInUseError):
                rewind(self.job.root, step, force=True)
            return
        late = self._stage("checkpoint") if in_flight else None
        if moment:  # one that dies at any instant is finished by the same call again
            in_a_process(lambda: self._rewind(step), self.folder, die_before=moment)
        self._rewind(step)
        self.repair()
        self.steps = {each: known for each, known in self.steps.items() if each not in newer}
        self.pinned -= newer
        for served in SERVES_AS[kind]:
            assert (
                find_newest(self.job.root, served).step
                == read_latest_pointer(self.job.root, served)
                == step
            )
        if late:
            with pytest.raises(SupersededError):
                self.job.commit(self.step, **late)
            mark_failed(self.job.spool, self.job.save(self.step, **late), "it was left behind")
        self.step = self._newest("checkpoint") or 0
        self._begin_run()

    def _rewind(self, step: int) -> None:
        rewind(self.job.root, step, force=True)

    def _begin_run(self) -> None:
        loaded = self.steps[self.step][0] if self.step else 0
        self.run = open_run(self.job.root, f"after run {self.run}", self.step, loaded).number
        self.lines[self.run] = {**self.lines.get(loaded, {}), self.run: math.inf}
        if loaded:
            self.lines[self.run][loaded] = self.step

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        pin(self.job.root, step)
        self.pinned.add(step)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.pinned)))
        assert unpin(self.job.root, step)
        self.pinned.discard(step)

    @precondition(lambda self: set(self.steps) - set(self.leased))
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(set(self.steps) - set(self.leased))))
        self.leased[step] = acquire_lease(self.job.root, step, "reader")

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.leased)))
        self.leased.pop(step).release()

    @rule()
    def repair(self) -> None:
        for repair in FILE_REPAIRS:
            assert all(finding.state == "repaired" for finding in repair(self.job.root))

    @rule(last=LASTS, every=MULTIPLES, syncs=LASTS)
    def retain(self, last: int, every: int, syncs: int) -> None:
        self._retain(last, every, syncs)
        wanted = self._wanted(last, every, syncs)
        have = {manifest.step for manifest in iter_committed_steps(self.job.root)}
        assert wanted <= have
        others = {step for step, known in self.steps.items() if self._is_of_another(known[0])}
        assert have - wanted <= self.crashed | self._resumed_from() | self._in_pointers() | others
        self.steps = {step: known for step, known in self.steps.items() if step in have}
        assert not any((self.job.root / ".trinity_sync").glob("trash/*"))

    @rule(last=LASTS, every=MULTIPLES, syncs=LASTS, moment=st.integers(1, 12))
    def retain_until_a_crash(self, last: int, every: int, syncs: int, moment: int) -> None:
        in_a_process(lambda: self._retain(last, every, syncs), self.folder, die_before=moment)
        have = {manifest.step for manifest in iter_committed_steps(self.job.root)}
        assert self._wanted(last, every, syncs) <= have
        self.steps = {step: known for step, known in self.steps.items() if step in have}

    def _retain(self, last: int, every: int, syncs: int) -> None:
        rules = Rules(parse_policy(f"last={last},every={every}"), parse_policy(f"last={syncs}"))
        made = plan_prune(self.job.root, rules, now=0)
        prune(self.job.root, made, spool=self.folder / "spool")

    def _by_age(self, sort: Kind) -> list[int]:
        of_sort = [step for step, (_, kind, _) in self.steps.items() if kind == sort]
        return sorted(of_sort, key=lambda step: (self.steps[step][0], step))

    def _counting(self, sort: Kind) -> list[int]:
        """Those that the newest run with such a step continues."""
        such = [run for run, kind, _ in self.steps.values() if sort in SERVES_AS[kind]]
        line = self.lines[max(such)] if such else {}
        return [step for step in self._by_age(sort) if step <= line.get(self.steps[step][0], -1)]

    def _is_of_another(self, run: int) -> bool:
        """Whether a later run is of another training, which removes no step of this one."""
        first = min(self.lines[run])
        return any(min(line) != first for later, line in self.lines.items() if later > run)

    def _newest(self, kind: Kind) -> int | None:
        serving = [step for step, known in self.steps.items() if kind in SERVES_AS[known[1]]]
        return max(serving, key=lambda step: (self.steps[step][0], step), default=None)

    def _wanted(self, last: int, every: int, syncs: int) -> set[int]:
        checkpoints = self._counting("checkpoint")
        wanted = {*checkpoints[-last:], *self._counting("state_dict")[-syncs:]}
        wanted |= {step for step in self._by_age("checkpoint") if step % every == 0}
        wanted |= self.pinned | set(self.leased)
        return wanted | {step for kind in KINDS if (step := self._newest(kind)) is not None}

    def _resumed_from(self) -> set[int]:
        run = find_newest_run(self.job.root)
        return {run.resumed_from} if run else set()

    def _in_pointers(self) -> set[int | None]:
        return {read_latest_pointer(self.job.root, kind) for kind in KINDS}

    @invariant()
    def the_newest_commit_of_each_kind_loads(self) -> None:
        for kind in KINDS:
            found = find_newest(self.job.root, kind)
            assert (found and found.step) == self._newest(kind)
            if found:
                states = load_states(self.job.root, found.step, "actor", rank=0, world_size=1)
                assert states["model"]["w"].tolist() == [self.steps[found.step][2]] * 3

    @invariant()
    def what_is_committed_is_whole_and_what_is_claimed_is_there(self) -> None:
        have = {manifest.step for manifest in iter_committed_steps(self.job.root)}
        assert have == set(self.steps)
        assert self.pinned | set(self.leased) <= have
        for step in have:
            require_committed(self.job.root, step)

    @invariant()
    def the_iteration_files_name_whole_steps(self) -> None:
        for kind in KINDS:
            named = read_latest_pointer(self.job.root, kind)
            if named is not None:
                assert kind in require_committed(self.job.root, named).kinds


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=int(os.environ.get("HISTORIES", "20")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
