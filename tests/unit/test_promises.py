"""The promises of the documentation, whatever happens to a job: `promised` has them as a model.

Hypothesis draws the life of a job: trainers that start, resume, save and die; flow runs that are
doubled, broken off and retried; outages, retention, rewinds, a spool that vanishes. Slots, files,
commits and the coordinator are the real ones; `prefect_stand_in` plays Prefect and Ray. After each
rule, what the product says and has on disk is compared with the model. See
docs/contributing/tests.md.

``PROMISES_MINUTES`` tries random lives for that long; ``PROMISES_SEED`` repeats them.
"""

import asyncio
import gc
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import trinity_sync.client.commit_watcher as watcher_module
from tests.conftest import environment
from tests.unit.prefect_stand_in import (
    RANK_TIMEOUT_S,
    FlowRun,
    Server,
    Trigger,
    without_catalog_and_pages,
)
from tests.unit.promised import Key, Model, Run, Saved, Step, Value
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import (
    ConfigError,
    SaveFailedError,
    StepInUseError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX
from trinity_sync.fs.records import encode_body
from trinity_sync.layout import SPOOL_FORMAT
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import prune
from trinity_sync.settings import Settings
from trinity_sync.storage.leases import Lease, acquire_lease
from trinity_sync.storage.pins import pin, tag, unpin
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind

POINTERS = {
    "checkpoint": "latest_checkpointed_iteration.txt",
    "state_dict": "latest_state_dict_iteration.txt",
}
OFTEN = st.sampled_from([True, True, True, False])
RARELY = st.sampled_from([False] * 7 + [True])
WORKS = st.sampled_from(["works", "works", "works twice"])
FLOW = WORKS | st.just("has no turn yet")
WHICH = st.integers(0, 5)
NAME = st.sampled_from("AB")
KIND = st.sampled_from(["checkpoint", "state_dict"])
KEEP = st.sampled_from([0, 0, 1, 2])
PARTS = st.sampled_from(
    [("model", "optim"), ("optim", "extra_state"), ("model",), ("model", "optim", "extra_state")]
)


def state_of(key: Key, value: Value) -> dict[str, Any]:
    """What training has at a step: the same again from the same configuration, unless otherwise."""
    step, config, other = value
    return {
        "config": "long " * config,
        "lr": 1 / (1 + step // 8 + other),
        "bias": torch.full((5,), float(step)),
        "weights": torch.tensor([step, config, other, key[2]], dtype=torch.float32),
        "of": "{} {} {}".format(*key),
    }


def comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    values = (each.tolist() if isinstance(each, torch.Tensor) else each for each in state.values())
    return (*state, *values)


@dataclass
class Trainer:
    """A start of the training, with the coordinators of its ranks."""

    key: str
    config: bool
    ranks: list[CheckpointCoordinator]
    run: int = 0
    step: int = 0
    computed: dict[int, bool] = field(default_factory=dict)
    """Whether a step came out otherwise than usual."""
    staged: tuple[int, dict[Key, Value]] = (-1, {})
    """The last step that was saved, and all that was submitted of it."""
    lost: int = -1
    """The step of which part has vanished with the spool."""


class Promises(RuleBasedStateMachine):
    """One job on one node, beside its model."""

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # so that the garbage of a trainer is found quickly
        self.open = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="trinity_sync-test-", dir="/dev/shm"))
        self.open.callback(shutil.rmtree, self.folder)
        self.root, self.spool = self.folder / "ckpts", self.folder / "spool"
        own = {"TRINITY_SYNC_SPOOL": str(self.spool), "TRINITY_SYNC_HOME": str(self.folder / "h")}
        self.open.enter_context(environment(own))
        self.settings = Settings(slot_wait_s=0)
        self.log = self.open.enter_context(Log())
        self.server = Server()
        self.model = Model()
        self.trainers: dict[str, Trainer] = {}
        self.raised: dict[str, str] = {}
        """What the calls of each trainer have raised."""
        self.leases: dict[int, Lease] = {}
        self.images: dict[str, tuple[str, int, Key, Value]] = {}
        """Images in the spool: slot, step and what they are."""
        self.newest: dict[str, tuple[int, int]] = {}
        self.looked_at: dict[int, object] = {}
        """The files of the steps that were loaded and compared."""

    @initialize(two_ranks=st.booleans(), two_roles=RARELY)
    def begin(self, two_ranks: bool, two_roles: bool) -> None:
        self.world_size = 1 + two_ranks
        self.roles = ("actor", "critic") if two_roles else ("actor",)
        self.observer = CheckpointCoordinator(
            self.root, settings=self.settings, trigger=Trigger(self.server)
        )
        self.start("A", "nothing", 0, config=False, syncs=False, saves=0, keep=0)

    # ------------------------------------------------------------ trainers

    @rule(
        name=NAME,
        loads=st.sampled_from(["load", "own files", "nothing"]),
        age=st.sampled_from([0, 0, 0, 1, 2]),
        config=st.booleans(),
        syncs=st.booleans(),
        saves=st.integers(0, 2),
        keep=KEEP,
    )
    def start(
        self, name: str, loads: str, age: int, config: bool, syncs: bool, saves: int, keep: int
    ) -> None:
        """A scheduler starts a training (again): one of this name is killed first.

        It loads the newest step as a rule, may give its explorers the weights, and goes on.
        """
        if name in self.trainers:
            self.stop(name, "SIGKILL")
        key = f"{name}{len(self.raised)}"
        ranks = [
            CheckpointCoordinator(
                self.root,
                rank=rank,
                world_size=self.world_size,
                roles=self.roles,
                run_key=key,
                job={"rank_timeout_s": RANK_TIMEOUT_S},
                settings=self.settings,
                trigger=Trigger(self.server),
            )
            for rank in range(self.world_size)
        ]
        self.raised[key] = ""
        trainer = self.trainers[name] = Trainer(key, config, ranks)
        if loads != "nothing" and self.model.steps:
            self.resume(trainer, self.model.by_age()[-1 - age % len(self.model.steps)], loads)
        if syncs:
            self.submit(trainer, trainer.step, "state_dict", ())
            self.stack_side("works")
        for _ in range(saves):
            self.submit(trainer, trainer.step + 1, "checkpoint", ("model", "optim"), keep=keep)
            self.stack_side("works")

    def resume(self, trainer: Trainer, step: int, loads: str) -> None:
        trainer.step = step
        there = self.model.steps[trainer.step]
        roles = {role for role, *_ in there.values} & {*self.roles}
        for rank in trainer.ranks:
            if loads == "own files" or not roles:
                rank.resumed_from(trainer.step)
                continue
            for role in roles:
                states = rank.load(trainer.step, role=role)
                found = {(role, part, rank.rank): comparable(states[part]) for part in states}
                assert found.items() <= self.expected(there).items()
        # a run that loads step 0 counts as one that began there without loading
        self.open_run(trainer, trainer.step, loaded=trainer.step > 0)

    @precondition(lambda self: self.trainers)
    @rule(name=NAME, how=st.sampled_from(["last line", "exception", "SIGKILL"]))
    def stop(self, name: str, how: str) -> None:
        """A training ends: at the last line of its ``with`` block, or otherwise."""
        if name not in self.trainers or (how == "last line" and self.server.away):
            return
        if how == "last line":
            for what in ("works", "sweeps", "works"):
                self.stack_side(what)
            self.wait_all(self.trainers[name])
        for saved in self.model.saves:
            if self.server.away and saved.trainer == self.trainers[name].key and not saved.values:
                saved.excuse = "functions leave no images that a sweep would find"
        for rank in self.trainers[name].ranks:
            if how == "SIGKILL":  # nothing is said to anybody, and the kernel releases locks
                rank._watcher.close()
            else:
                rank.close(timeout=0)
            rank._watcher._trigger.hang_up()
        del self.trainers[name]
        rank = None
        gc.collect()  # file descriptors go with their objects

    def open_run(self, trainer: Trainer, step: int = 0, *, loaded: bool = False) -> None:
        if not trainer.run:
            self.model.runs.append(Run(trainer.key, step, loaded))
            trainer.run = len(self.model.runs)

    def living(self, which: int) -> Trainer:
        names = sorted(self.trainers)
        return self.trainers[names[which % len(names)]]

    def wait_all(self, trainer: Trainer) -> None:
        for rank in trainer.ranks:
            try:
                rank.wait_all(timeout=10)
            except SaveFailedError as error:
                self.raised[trainer.key] += f"{error}\n"

    # ------------------------------------------------------------ what a trainer submits

    @precondition(lambda self: self.trainers)
    @rule(saves=st.integers(1, 3), kind=KIND, keep=KEEP, flow=WORKS)
    def train(self, saves: int, kind: str, keep: int, flow: str) -> None:
        """What nearly all jobs do nearly all the time; of two trainers, both go on."""
        for _ in range(saves):
            for trainer in self.trainers.values():
                self.submit(trainer, trainer.step + 1, kind, ("model", "optim"), keep=keep)
                self.stack_side(flow)

    @precondition(lambda self: self.trainers)
    @rule(
        which=WHICH,
        ahead=st.sampled_from([1, 1, 0, 0, 2]),  # a step before the newest is refused
        kind=KIND,
        parts=PARTS,
        other=st.booleans(),
        overlap=st.booleans(),
        keep=KEEP,
        attach=RARELY,
        rank_is_lost=RARELY,
        flow=FLOW,
    )
    def save(self, which: int, ahead: int, rank_is_lost: bool, flow: str, **how: Any) -> None:
        """Any save that a trainer may think of; a rank may be lost before it submits its part."""
        trainer = self.living(which)
        step = max(0, trainer.step + ahead)
        self.submit(trainer, step, rank_is_lost=rank_is_lost, **how)
        if rank_is_lost:  # and the others with it
            name = next(name for name in self.trainers if self.trainers[name] is trainer)
            self.stop(name, "SIGKILL")
        self.stack_side(flow)

    @precondition(lambda self: self.trainers and not self.server.away)
    @rule(which=WHICH, kind=KIND, parts=PARTS, other=st.booleans())
    def save_again(self, which: int, kind: str, parts: tuple[str, ...], other: bool) -> None:
        """The last step once more, perhaps with another content, when the first is committed."""
        self.stack_side("works")
        trainer = self.living(which)
        self.submit(trainer, trainer.step, kind, parts, other=other)
        self.stack_side("sweeps")

    def submit(
        self,
        trainer: Trainer,
        step: int,
        kind: str,
        parts: tuple[str, ...],
        *,
        other: bool = False,
        overlap: bool = False,
        keep: int = 0,
        attach: bool = False,
        rank_is_lost: bool = False,
    ) -> None:
        """Have all ranks save a step, for all roles."""
        self.open_run(trainer)
        trainer.step = step
        again = self.model.of(trainer.run, step, kind)
        if not any(each.values for each in again):  # a step has one state, whatever is saved of it
            other = trainer.computed.setdefault(step, other)
        value = (step, trainer.config, other)
        if kind == "state_dict":
            parts, attach = ("model",), False
        if trainer.staged[0] != step:
            trainer.staged = (step, {})
        values: dict[str, dict[Key, Value]] = {role: {} for role in self.roles}
        excuse = "part of it has vanished with the spool" if step == trainer.lost else ""
        if rank_is_lost and self.world_size > 1:
            excuse = "a rank is lost"
        is_told = False
        for rank in trainer.ranks[:1] if rank_is_lost else trainer.ranks:
            if is_told:
                break  # the error of rank 0 ends the job
            for role in self.roles:
                states = {part: state_of((role, part, rank.rank), value) for part in parts}
                values[role] |= {(role, part, rank.rank): value for part in parts}
                try:
                    if attach and role == self.roles[0]:
                        with suppress(ConfigError):  # it comes too late for the step
                            rank.attach("note", repr(value).encode(), step=step)
                            values[role]["attachments", "attachments", rank.rank] = value
                    rank.save(step, states, role=role, kind=kind, overlap=overlap, keep=keep)
                    rank.wait_staged()
                except TrinitySyncError as error:
                    if not (again or self.model.superseded(trainer.run, step)):
                        raise
                    excuse = "the call has raised"
                    is_told |= isinstance(error, SupersededError)
                    self.raised[trainer.key] += f"step {step}: {error}\n"
                for state in states.values():  # training goes on
                    state["weights"].zero_()
        groups = [self.roles] if kind == "checkpoint" else [(role,) for role in self.roles]
        for roles in groups:
            its = {key: value for role in roles for key, value in values[role].items()}
            if kind == "checkpoint":  # what was submitted for the step's sync is part of it
                its = trainer.staged[1] | its
            saved = Saved(trainer.key, trainer.run, step, kind, roles, its, excuse)
            self.model.saves.append(saved)
            self.note_images(saved)
        for key in (key for role in self.roles for key in values[role]):
            trainer.staged[1].setdefault(key, value)
        self.model.see_what_is_committed(step)
        self.no_image_goes_before_it_is_committed()

    @precondition(lambda self: self.trainers)
    @rule(which=WHICH, ahead=st.integers(0, 2))
    def upload(self, which: int, ahead: int) -> None:
        """Weights for the readers of this node; they are not saved."""
        trainer = self.living(which)
        self.open_run(trainer)
        step = trainer.step = trainer.step + ahead
        value = (step, trainer.config, trainer.computed.setdefault(step, False))
        for rank in trainer.ranks:
            for role in self.roles:
                key = (role, "model", rank.rank)
                with self.superseded_perhaps(trainer, step):
                    rank.upload(step, lambda key=key: state_of(key, value), role=role)

    @precondition(lambda self: self.trainers)
    @rule(which=WHICH, ahead=st.integers(0, 1), kind=KIND, fails=RARELY, asks=OFTEN, flow=FLOW)
    def save_by_a_function(
        self, which: int, ahead: int, kind: str, fails: bool, asks: bool, flow: str
    ) -> None:
        """Trinity's calls: ``save_async``, then ``register_and_monitor``."""
        trainer = self.living(which)
        self.open_run(trainer)
        step = trainer.step = trainer.step + ahead
        is_sync = kind == "state_dict"
        called = []

        def write() -> None:
            called.append(step)
            if fails:
                raise OSError("the function fails")
            folder = self.root / f"global_step_{step}" / "own"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{kind} of {trainer.key}").write_text(f"{step} {trainer.config}")

        started = False
        for rank in trainer.ranks:
            with self.superseded_perhaps(trainer, step):
                rank.save_async("own", write, step, is_state_dict=is_sync)
                started = True
        if not started:
            return
        for thread in threading.enumerate():
            if thread.name == f"save-own-step{step}":
                thread.join()
        self.see_displaced(trainer, step)
        self.model.functions.add((trainer.run, step, kind))
        if not called:  # another run's commit of the step is needed; a sync may have taken it over
            begins_at = self.model.runs[trainer.run - 1].begins_at
            assert self.model.steps[step].run != trainer.run or step == begins_at
        if fails or not called:
            self.model.failed_functions.add((trainer.run, step, kind))
        if asks:
            saved = Saved(trainer.key, trainer.run, step, kind, self.roles, {})
            earlier = self.model.of(trainer.run, step, kind)
            if step not in self.model.steps and any(each.committed for each in earlier):
                saved.excuse = "its flow run has ended, and its step has been removed since"
            self.model.saves.append(saved)
            for rank in trainer.ranks:
                asyncio.run(
                    rank.register_and_monitor(step, is_sync, int(is_sync), int(not is_sync))
                )
            self.model.see_what_is_committed(step)
        self.stack_side(flow)

    @contextmanager
    def superseded_perhaps(self, trainer: Trainer, step: int) -> Iterator[None]:
        """Let a call be refused if a later run has superseded the step."""
        try:
            yield
        except SupersededError:
            assert self.model.superseded(trainer.run, step)

    def see_displaced(self, trainer: Trainer, step: int) -> None:
        """A superseded step may make way for a function; no kind is without a step by that."""
        there = self.model.steps.get(step)
        if there and step not in self.on_disk():
            assert there.run < trainer.run, "a run's own step is gone"
            assert self.model.superseded(there.run, step)
            assert step not in self.model.claimed
            kinds = self.model.newest().keys()
            del self.model.steps[step]
            self.newest = self.model.newest()
            assert kinds == self.newest.keys(), "nothing is left to resume from"

    # ------------------------------------------------------------ the stack side

    @rule(what=st.sampled_from(["works", "works twice", "goes away", "comes back", "sweeps"]))
    def stack_side(self, what: str) -> None:
        """The worker runs all that is to be run, or sweeps; the server goes away or comes back.

        It works twice where two workers take a run at a time: their tasks alternate.
        """
        if what == "goes away":
            self.server.away = True
        elif what == "comes back":
            self.server.come_back()
        elif what == "sweeps" and not self.server.away:
            self.server.recover_images(self.spool)
        elif what.startswith("works") and not self.server.away:
            for run in list(self.server.runs.values()):
                if run.state == "pending":
                    self.server.begin(run)
                    if what == "works twice":
                        self.server.begin(run)
                while run.attempts:
                    for attempt in list(run.attempts):
                        self.do_task(run, attempt)

    @precondition(lambda self: self.server.runs and not self.server.away)
    @rule(which=WHICH, tasks=st.integers(1, 4))
    def begin_attempt(self, which: int, tasks: int) -> None:
        """A run is begun, or begun once more while it is under way, or retried."""
        runs = list(self.server.runs.values())
        run = runs[-1 - which % len(runs)]
        self.do_tasks(run, self.server.begin(run), tasks)

    @precondition(lambda self: self.under_way())
    @rule(which=WHICH, tasks=st.integers(0, 4), then_dies=RARELY)
    def go_on(self, which: int, tasks: int, then_dies: bool) -> None:
        """An attempt that is under way gets some tasks further; then its worker may be killed."""
        attempts = self.under_way()
        run, attempt = attempts[which % len(attempts)]
        self.do_tasks(run, attempt, tasks)
        if then_dies and attempt in run.attempts:
            attempt.close()
            run.attempts.remove(attempt)
            if run.state == "running" and not run.attempts:
                run.state, run.message = "crashed", "its process died"

    def under_way(self) -> list[tuple[FlowRun, Iterator[str]]]:
        return [(run, each) for run in self.server.runs.values() for each in run.attempts]

    def do_tasks(self, run: FlowRun, attempt: Iterator[str], most: int) -> None:
        for _ in range(most):
            if attempt in run.attempts:
                self.do_task(run, attempt)

    def do_task(self, run: FlowRun, attempt: Iterator[str]) -> None:
        before, request = run.state, run.request
        what = run.advance(attempt)
        if currently_in_test_context():
            note(f"    run {request.run}, {request.kind} of step {request.step}: {what}")
        if what == "committed":
            self.see_commit(request, before)
        elif what == "pruned":
            stay = self.model.kept(last=request.keep, last_syncs=100)
            self.see_removal(stay | self.model.earlier(request.run))
        elif what.startswith("failed") and run.state == "failed" and not run.attempts:
            save = (request.run, request.step, request.kind, request.roles)
            assert self.model.reason_to_fail(*save), f"{request.run_name}: {run.message}"

    def see_commit(self, request: SaveRequest, state: str) -> None:
        """A flow run says that a save is committed: so it has to be, as it was submitted."""
        model, run, step, kind = self.model, request.run, request.step, request.kind
        what = f"{kind} of step {step}, run {run}"
        there = model.steps.get(step)
        saves = [each for each in model.of(run, step, kind) if each.roles == request.roles]
        done = state == "completed" or any(each.committed for each in saves)
        if there and there.run == run and kind in there.kinds and done:
            # an attempt after the commit: what functions wrote may join it, other images do not
            if (run, step, kind) in model.functions:
                there.kinds |= {kind, "state_dict"}
            return
        assert not model.superseded(run, step), f"{what} was superseded, and came back"
        assert not there or there.run <= run, f"{what} replaces that of a later run"
        outcomes = [outcome for each in saves for outcome in model.outcomes(each)]
        found = self.loaded(step, {key for each in outcomes for key in each.values})
        fitting = [each for each in outcomes if self.expected(each) == found]
        assert fitting, f"{what} is committed, and nobody has submitted {found}"
        model.steps[step] = fitting[0]
        model.see_what_is_committed(step)

    # ------------------------------------------------------------ steps that stay, and go

    @precondition(lambda self: self.model.steps)
    @rule(which=WHICH, how=st.sampled_from(["pin", "tag", "lease", "nobody claims anything"]))
    def claim(self, which: int, how: str) -> None:
        """Somebody needs a step; or nobody needs any."""
        step = sorted(self.model.steps)[which % len(self.model.steps)]
        if how == "pin":
            pin(self.root, step)
            self.model.pinned.add(step)
        elif how == "tag":
            tag(self.root, step, "best", force=True)
            self.model.tags["best"] = step
        elif how == "lease" and step not in self.leases:
            self.leases[step] = acquire_lease(self.root, step, "reader")
            self.model.leased.add(step)
        elif how == "nobody claims anything":
            for claimed in (*self.model.pinned, *self.model.tags):
                unpin(self.root, claimed)
            for lease in self.leases.values():
                lease.release()
            for claims in (self.model.pinned, self.model.tags, self.model.leased, self.leases):
                claims.clear()

    @precondition(lambda self: self.model.steps)
    @rule(last=st.integers(1, 3), last_syncs=st.integers(1, 2))
    def prune(self, last: int, last_syncs: int) -> None:
        """``trinity-sync prune --keep last=... --keep-weights last=...``"""
        rules = Rules(parse_policy(f"last={last}"), parse_policy(f"last={last_syncs}"))
        options = {"spool": self.settings.spool, "recycle": True}
        prune(self.root, rules, time.time(), **options)
        self.see_removal(self.model.kept(last=last, last_syncs=last_syncs))

    def see_removal(self, stay: set[int]) -> None:
        left = self.on_disk()
        assert stay <= left, f"steps {sorted(stay - left)} were removed"
        steps = self.model.steps
        self.model.steps = {step: steps[step] for step in steps if step in left}

    @precondition(lambda self: self.model.steps)
    @rule(which=WHICH)
    def go_back(self, which: int) -> None:
        """``trinity-sync rewind --force``"""
        step = sorted(self.model.steps)[which % len(self.model.steps)]
        if self.model.newer(step) & self.model.leased:
            with pytest.raises(StepInUseError):
                rewind(self.root, step, force=True)
            return
        rewind(self.root, step, force=True)
        self.model.rewind(step)
        self.newest = self.model.newest()  # this was asked for

    # ------------------------------------------------------------ what else happens to a node

    @property
    def job_spool(self) -> Path:
        return self.observer.spool.folder

    @precondition(lambda self: self.job_spool.exists())
    @rule(what=st.sampled_from(["spool vanishes", "spool is copied", "older ticket", "fork"]))
    def mishap(self, what: str) -> None:
        """Somebody empties /dev/shm or keeps a copy of it, an older client was there, a fork."""
        if what == "spool vanishes":
            shutil.rmtree(self.job_spool)
            self.images.clear()
            for saved in self.model.saves:
                saved.excuse = saved.excuse or "the spool has vanished"
            for trainer in self.trainers.values():
                trainer.lost = trainer.staged[0]
        elif what == "spool is copied":
            shutil.copytree(self.job_spool, self.spool / "copy", dirs_exist_ok=True)
        elif what == "older ticket":
            slot = self.job_spool / f"actor.model.rank0.{len(self.model.saves) % 4}.slot"
            ticket = slot.with_name(f"{slot.name}.ticket")
            if not ticket.exists():
                slot.touch(mode=0o600)
                ticket.write_text(encode_body({"step": 3}, SPOOL_FORMAT - 1))
        else:
            for trainer in self.trainers.values():
                self.fork(trainer)

    def fork(self, trainer: Trainer) -> None:
        """A child of a trainer (a data loader's worker) ends inside the ``with`` block."""
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            with suppress(BaseException):
                for rank in trainer.ranks:
                    with rank:
                        sys.exit()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status), "a child does not get out of the with block"

    # ------------------------------------------------------------ what is there

    def expected(self, step: Step) -> dict[Key, Any]:
        return {
            key: repr(value).encode()
            if key[0] == "attachments"
            else comparable(state_of(key, value))
            for key, value in step.values.items()
        }

    def loaded(self, step: int, keys: set[Key], **spool: Any) -> dict[Key, Any]:
        """All that can be loaded of a step, for the roles and ranks of ``keys``."""
        found: dict[Key, Any] = {}
        for role, rank in {(role, rank) for role, _, rank in keys}:
            with suppress(TrinitySyncError):
                if role == "attachments":
                    found[role, role, rank] = self.observer.attachment(step, "note", rank=rank)
                    continue
                where = {"rank": rank, "world_size": self.world_size}
                states = load_states(self.root, step, role, **where, **spool)
                found |= {(role, part, rank): comparable(states[part]) for part in states}
        return found

    def on_disk(self) -> set[int]:
        names = [path.parent.name for path in self.root.glob("global_step_*/manifest.json")]
        return {int(name.removeprefix("global_step_")) for name in names}

    def tickets(self) -> dict[str, dict[str, Any]]:
        """The images that wait, by slot."""
        found = {}
        for path in self.job_spool.glob("*.slot.ticket"):
            with suppress(FileNotFoundError):  # the trainer's thread has just freed the slot
                found[str(path).removesuffix(".ticket")] = json.loads(path.read_text())
        return {slot: body for slot, body in found.items() if "image" in body}

    def note_images(self, saved: Saved) -> None:
        for slot, body in self.tickets().items():
            role = "attachments" if body["component"] == "attachments" else body["role"]
            key = (role, body["component"], body["rank"])
            whose = (body["run"], body["step"], body["kind"])
            if whose == (saved.run, saved.step, saved.kind) and key in saved.values:
                self.images.setdefault(body["image"], (slot, saved.step, key, saved.values[key]))

    # ------------------------------------------------------------ the promises

    @invariant()
    def promises_hold(self) -> None:
        """Compare, after every rule, what is there with the model."""
        self.a_committed_step_is_what_was_submitted()
        self.the_newest_of_a_kind_never_falls()
        self.a_pointer_names_a_committed_step_of_its_kind()
        assert self.model.claimed <= set(self.model.steps), "a claimed step is gone"
        self.no_image_goes_before_it_is_committed()

    def a_committed_step_is_what_was_submitted(self) -> None:
        assert self.on_disk() == set(self.model.steps)
        for step, each in self.model.steps.items():
            found_now = self.root.glob(f"global_step_{step}/**/*")
            # a trainer's thread may just be replacing the manifest
            files = sorted(path for path in found_now if path.suffix != TEMPORARY_SUFFIX)
            seen = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
            if self.looked_at.get(step) != seen:
                found = self.loaded(step, set(each.values))
                assert found == self.expected(each), f"step {step} is not what was submitted"
                self.looked_at[step] = seen

    def the_newest_of_a_kind_never_falls(self) -> None:
        now = self.model.newest()
        for kind, age in self.newest.items():
            assert now.get(kind, (0, 0)) >= age, f"the newest {kind} was {age} (run, step)"
        self.newest = now
        for kind, (_, step) in now.items():
            folder = self.observer.latest(kind)
            assert folder == self.root / f"global_step_{step}", f"latest({kind}) is {folder}"

    def a_pointer_names_a_committed_step_of_its_kind(self) -> None:
        for kind, name in POINTERS.items():
            path = self.root / name
            named = self.model.steps.get(int(path.read_text())) if path.exists() else None
            kinds = named.kinds if named else set()
            assert kind in kinds or not (path.exists() or kind in self.newest), name

    def no_image_goes_before_it_is_committed(self) -> None:
        """Without a warning, that is, which names the slot."""
        waiting = {body["image"] for body in self.tickets().values()} if self.images else set()
        for image in set(self.images) - waiting:
            slot, step, key, value = self.images.pop(image)
            if any(slot in message for message in self.log.messages):
                for saved in self.model.saves:
                    if saved.step == step and saved.values.get(key) == value:
                        saved.excuse = saved.excuse or "its image was evicted"
            else:
                assert (step, key, value) in self.model.ever, f"{key} of step {step} was dropped"
        self.log.messages.clear()

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        try:
            if not sys.exc_info()[0] and self.model.runs:  # else the example has failed before
                self.every_save_comes_to_an_end()
        finally:
            with self.open:
                for trainer in self.trainers.values():
                    for rank in trainer.ranks:
                        rank.close(timeout=0)
                self.trainers.clear()
            gc.collect()

    def every_save_comes_to_an_end(self) -> None:
        """Each save is committed, superseded, or has failed and somebody was told."""
        self.server.come_back()
        for what in ("works", "sweeps", "works"):
            self.stack_side(what)
        for trainer in self.trainers.values():
            self.wait_all(trainer)
        self.looked_at.clear()
        self.promises_hold()
        for step, each in self.model.steps.items():
            found = self.loaded(step, set(each.values), spool=self.observer.spool)
            assert found == self.expected(each), f"step {step} is not what was submitted"
        alive = {trainer.key for trainer in self.trainers.values()}
        for saved in self.model.saves:
            if saved.committed or self.model.superseded(saved.run, saved.step):
                continue
            told = f"step {saved.step}" in self.raised[saved.trainer]
            if saved.trainer not in alive:  # then it is in the log, or in the Prefect UI
                its = (saved.run, saved.step, saved.kind)
                runs = self.server.runs.values()
                failed = [run.request for run in runs if run.state == "failed"]
                told |= bool(saved.excuse)
                told |= its in {(each.run, each.step, each.kind) for each in failed}
                slots = [slot for slot, step, *_ in self.images.values() if step == saved.step]
                told |= any(Path(f"{slot}.failed").exists() for slot in slots)
            assert told, f"nobody is told that it was not committed: {saved}"


class Log(logging.Handler):
    """The warnings of the product, which are not shown meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> "Log":
        logger = logging.getLogger("trinity_sync")
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("trinity_sync")
        logger.removeHandler(self)
        logger.propagate = True


MINUTES = float(os.environ.get("PROMISES_MINUTES") or 0)
HOW = settings(
    max_examples=int(os.environ.get("PROMISES_EXAMPLES") or 150),
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=not MINUTES,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if "PROMISES_AT_ONCE" not in os.environ else [])],
)


@pytest.mark.timeout(900 + 60 * MINUTES)
def test_the_promises_hold_whatever_happens_to_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    without_catalog_and_pages(monkeypatch)
    for name in ("LOOK_S", "ASK_S"):
        monkeypatch.setattr(watcher_module, name, (0.005, 0.005))
    end = time.monotonic() + 60 * MINUTES
    try:
        while True:
            if MINUTES:
                chosen = int(os.environ.get("PROMISES_SEED") or secrets.randbelow(2**32))
                print(f"PROMISES_SEED={chosen}", file=sys.__stdout__, flush=True)
                seed(chosen)(Promises)
            run_state_machine_as_test(Promises, settings=HOW)
            if time.monotonic() >= end:
                break
    finally:
        gc.unfreeze()
