"""The promises of the documentation, whatever happens to a job: `promised` has them as a model.

Hypothesis draws the life of a job: trainers that start, resume, save and die; flow runs that are
doubled, broken off and retried; outages, retention, rewinds, a spool that vanishes. Slots, files,
commits and the coordinator are real; `prefect_stand_in` plays Prefect and Ray. After each
rule, what the product says and has on disk is compared with the model. See
docs/contributing/tests.md.

``PROMISES_MINUTES`` tries random lives for that long; ``PROMISES_SEED`` repeats them.
"""

import asyncio
import errno
import gc
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, currently_in_test_context, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import trinity_sync.client.commit_watcher as watcher_module
import trinity_sync.client.coordinator as coordinator_module
from tests.conftest import SPOOLS, environment
from tests.models.promised import Key, Run, Saved, Step, Value
from tests.models.promised_others import Evaluator, Others
from tests.models.promised_world import (
    OFTEN,
    RARELY,
    Job,
    Readers,
    Trainer,
    World,
    comparable,
    state_of,
    where,
)
from tests.support.driven_saver import Node
from tests.support.leases import acquire_lease
from tests.support.prefect_stand_in import (
    FlowRun,
    Server,
    without_catalog_and_pages,
)
from trinity_sync.client import run_context
from trinity_sync.errors import (
    ConfigError,
    RootInUseError,
    SaveFailedError,
    SaveTimeoutError,
    SpoolError,
    StepInUseError,
    SupersededError,
    TrinitySyncError,
)
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX
from trinity_sync.fs.records import encode_body
from trinity_sync.layout import SERVES_AS, SPOOL_FORMAT
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.storage import manifest
from trinity_sync.storage import runs as living_run
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.steps_in_use import pin, tag, unpin

POINTERS = {
    "checkpoint": "latest_checkpointed_iteration.txt",
    "state_dict": "latest_state_dict_iteration.txt",
}
WORKS = st.sampled_from(["works", "works", "works twice"])
FLOW = WORKS | st.just("has no turn yet")
WHICH = st.integers(0, 5)
NAME = st.sampled_from("AB")
KIND = st.sampled_from(["checkpoint", "state_dict"])
KEEP = st.sampled_from([0, 0, 1, 2])
NO_SPACE = (SpoolError,)
"""What a first save raises where no slot is left."""
PARTS = st.sampled_from(
    [("model", "optim"), ("optim", "extra_state"), ("model",), ("model", "optim", "extra_state")]
)


class Promises(World, Others, RuleBasedStateMachine):
    """The jobs of a node and their models; a rule is of the job whose turn it is."""

    saver: Literal["stack", "built-in"] = "stack"

    def __init__(self) -> None:
        super().__init__()
        gc.freeze()  # so that the garbage of a trainer is found quickly
        self.open = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
        self.open.callback(shutil.rmtree, self.folder)
        self.spool = self.folder / "spool"
        own = {"TRINITY_SYNC_SPOOL": str(self.spool), "TRINITY_SYNC_HOME": str(self.folder / "h")}
        self.open.enter_context(environment(own))
        self.settings = Settings(slot_wait_s=0, saver=self.saver)
        self.log = self.open.enter_context(Log())
        self.server = self.make_server()
        self.open.callback(self.server.end)
        self.jobs: list[Job] = []
        self.ending: threading.Timer | None = None
        """Lets the functions of a save end while its commit waits for them."""
        self.numbers = itertools.count(1)
        self.readers: dict[Path, Readers] = {}
        self.remote = self.folder / "remote"
        self.copier = ""
        """Identity of the job that has copied steps to the remote, and what these are."""
        self.copied: dict[int, Step] = {}
        self.evaluators: dict[Path, list[Evaluator]] = {}
        self.recorded: dict[int, Step] = {}
        """The metrics that were recorded, each once, and of what."""
        patch = self.open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(coordinator_module, "SaveTrigger", self.server.make_trigger)  # participants'
        self.images: dict[str, tuple[Job, str, int, Key, Value]] = {}
        """Images in the spool: whose they are, slot, step and what they are."""

    def make_server(self) -> Server:
        return Server(self.commit_waits)

    def __getattr__(self, name: str) -> Any:
        """What the job has whose turn it is."""
        return getattr(vars(self)["job"], name)

    @initialize(
        ranks_and_roles=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 1), (1, 2), (2, 2)]),
        parts=st.booleans(),
        a_remote=st.sampled_from([False, False, True]),
        small_spool=RARELY,
    )
    def begin(
        self,
        ranks_and_roles: tuple[int, int],
        parts: bool,
        a_remote: bool,
        small_spool: bool,
    ) -> None:
        self.a_remote = a_remote
        self.small_spool = small_spool and self.mount_small(self.spool)
        if parts:  # the manifests of steps with thousands of files have some
            patch = self.open.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(manifest, "PART_FILES", 2)
        self.world_size, roles = ranks_and_roles
        self.roles = ("actor", "critic")[:roles]
        self.begin_job(self.folder / "ckpts")

    def mount_small(self, folder: Path) -> bool:
        """Mount a file system with space for a few images; returns whether this user may."""
        folder.mkdir(mode=0o700)
        options = ["-t", "tmpfs", "-o", "size=72k,mode=700", "tmpfs"]
        if subprocess.run(["mount", *options, folder], capture_output=True).returncode:
            return False
        self.open.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
        return True

    # ------------------------------------------------------------ trainers

    @rule(
        name=NAME,
        loads=st.sampled_from(["load", "own files", "nothing"]),
        age=st.sampled_from([0, 0, 0, 1, 2]),
        config=st.booleans(),
        syncs=st.booleans(),
        saves=st.integers(0, 2),
        keep=KEEP,
        take_over=OFTEN,
        prunes=st.booleans(),
    )
    def start(
        self,
        name: str,
        loads: str,
        age: int,
        config: bool,
        syncs: bool,
        saves: int,
        keep: int,
        take_over: bool = True,
        prunes: bool = False,
    ) -> None:
        """A scheduler starts a training (again): one of this name is killed first.

        It loads the newest step as a rule, may give its explorers the weights, and goes on. While
        another one lives, it is refused unless it takes over.
        """
        if name in self.trainers:
            self.stop(name, "SIGKILL")
        key = f"{name}{len(self.raised)}"  # the first start of each job has the same
        ranks = [
            self.coordinator(
                self.root,
                rank=rank,
                world_size=self.world_size,
                roles=self.roles,
                run_key=key,
                take_over=take_over,
            )
            for rank in range(self.world_size)
        ]
        self.raised[key] = ""
        if not take_over and self.is_living():
            with pytest.raises(RootInUseError):
                ranks[0].begin()
            for rank in ranks:
                rank.close(timeout=0)
            return
        trainer = self.trainers[name] = Trainer(key, config, ranks)
        if loads != "nothing" and self.model.steps:
            self.resume(trainer, self.model.by_age()[-1 - age % len(self.model.steps)], loads)
        if not take_over:
            for rank in ranks:
                rank.begin()
            self.open_run(trainer)
        if prunes and self.model.steps:
            self.prune(1, 1)
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
        self.open_run(trainer, trainer.step, loaded=there.run)

    @rule(name=NAME, how=st.sampled_from(["last line", "exception", "SIGKILL"]))
    @where(lambda self: self.trainers)
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
        self.end_functions()
        for rank in self.trainers[name].ranks:
            if how == "SIGKILL":  # without a word; the kernel releases the locks
                rank._watcher.close()
                rank._run.close()
            else:
                rank.close(timeout=0)
            rank._watcher._trigger.hang_up()
        if participant := self.trainers[name].participant:
            participant._member.close()
            participant._saves.close(timeout=0)
            participant._saves._watcher._trigger.hang_up()
            participant = None
        del self.trainers[name]
        rank = None
        gc.collect()  # file descriptors go with their objects

    def open_run(self, trainer: Trainer, step: int = 0, *, loaded: int = 0) -> None:
        if not trainer.run:
            self.model.runs.append(Run(trainer.key, step, loaded > 0, back_to_run=loaded))
            trainer.run = len(self.model.runs)

    def living(self, which: int) -> Trainer:
        names = sorted(self.trainers)
        return self.trainers[names[which % len(names)]]

    def wait_all(self, trainer: Trainer) -> None:
        self.end_functions()
        for what in ("sweeps", "works"):  # a save that waited for its root is found by a sweep
            self.stack_side(what)
        for rank in trainer.ranks:
            try:
                rank.wait_all(timeout=250)
            except SaveFailedError as error:
                self.raised[trainer.key] += f"{error}\n"

    # ------------------------------------------------------------ what a trainer submits

    @rule(saves=st.integers(1, 3), kind=KIND, keep=KEEP, flow=WORKS)
    @where(lambda self: self.trainers)
    def train(self, saves: int, kind: str, keep: int, flow: str) -> None:
        """What nearly all jobs do nearly all the time; of two trainers, both go on."""
        for _ in range(saves):
            for trainer in self.trainers.values():
                self.submit(trainer, trainer.step + 1, kind, ("model", "optim"), keep=keep)
                self.stack_side(flow)

    @rule(
        which=WHICH,
        ahead=st.sampled_from([1, 1, 0, 0, -1, 2, -3]),
        kind=KIND,
        parts=PARTS,
        other=st.booleans(),
        overlap=st.booleans(),
        keep=KEEP,
        attach=st.booleans(),
        rank_is_lost=RARELY,
        flow=FLOW,
    )
    @where(lambda self: self.trainers)
    def save(self, which: int, ahead: int, rank_is_lost: bool, flow: str, **how: Any) -> None:
        """Any save that a trainer may think of; a rank may be lost before it submits its part."""
        trainer = self.living(which)
        step = max(0, trainer.step + ahead)
        self.submit(trainer, step, rank_is_lost=rank_is_lost, **how)
        if rank_is_lost:  # and the others with it
            name = next(name for name in self.trainers if self.trainers[name] is trainer)
            self.stop(name, "SIGKILL")
        self.stack_side(flow)

    @rule(which=WHICH, kind=KIND, parts=PARTS, other=st.booleans())
    @where(lambda self: self.trainers and not self.server.away)
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
        if step < trainer.saved.get(kind, 0):  # it would not be found, and be removed first
            for rank in trainer.ranks:
                with pytest.raises((ConfigError, SupersededError)):
                    rank.save(step, {"model": {}}, role=self.roles[0], kind=kind)
            return
        is_late = step < trainer.tried.get(kind, 0)  # after a step whose call has raised
        trainer.step, trainer.tried[kind] = step, max(step, trainer.tried.get(kind, 0))
        again = self.model.of(trainer.run, step, kind)
        if not any(each.values for each in again):  # a step has one state, whatever is saved of it
            other = trainer.computed.setdefault(step, other)
        value = (step, trainer.config, other, self.number)
        if kind == "state_dict":
            parts, attach = ("model",), False
        if "model" in parts:
            self.model.weights.setdefault((trainer.run, step), []).append(value)
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
                            rank.attach("constant", b"always", step=step)
                            values[role]["attachments", "attachments", rank.rank] = value
                    rank.save(step, states, role=role, kind=kind, overlap=overlap, keep=keep)
                    rank.wait_staged()
                except TrinitySyncError as error:
                    full = self.small_spool and isinstance(error, NO_SPACE)
                    if not (again or full or is_late or self.model.superseded(trainer.run, step)):
                        raise
                    excuse = "the call has raised"
                    is_told |= isinstance(error, SupersededError)
                    self.raised[trainer.key] += f"step {step}: {error}\n"
                for state in states.values():  # training goes on
                    state["lora_weights"].zero_()
        if self.small_spool and any(
            f"continues: step {step}," in each for each in self.log.messages
        ):
            excuse = "the spool was full"
        if excuse != "the call has raised":
            trainer.saved[kind] = step
        groups = [self.roles] if kind == "checkpoint" else [(role,) for role in self.roles]
        for roles in groups:
            its = {key: value for role in roles for key, value in values[role].items()}
            saved = Saved(trainer.key, trainer.run, step, kind, roles, its, excuse)
            if kind == "checkpoint":  # what was submitted for the step's sync is part of it
                saved.values = trainer.staged[1] | its
                saved.of_sync = frozenset(trainer.staged[1].keys() - its)
            self.model.saves.append(saved)
            self.note_images(saved)
        for key in (key for role in self.roles for key in values[role]):
            trainer.staged[1].setdefault(key, value)
        self.model.see_what_is_committed(step)
        self.no_image_goes_before_it_is_committed()

    @rule(which=WHICH, ahead=st.integers(0, 2))
    @where(lambda self: self.trainers)
    def upload(self, which: int, ahead: int) -> None:
        """Weights for the readers of this node; they are not saved."""
        trainer = self.living(which)
        self.open_run(trainer)
        step = trainer.step = trainer.step + ahead
        value = (step, trainer.config, trainer.computed.setdefault(step, False), self.number)
        weights = self.model.weights.setdefault((trainer.run, step), [])
        weights.append(value)
        refused = NO_SPACE if self.small_spool else ()
        if len({*weights}) > 1 or step < trainer.tried.get("upload", 0):  # readers keep the others
            refused = (*refused, ConfigError)
        trainer.tried["upload"] = max(step, trainer.tried.get("upload", 0))
        for rank in trainer.ranks:
            for role in self.roles:
                key = (role, "model", rank.rank)
                with suppress(*refused), self.superseded_perhaps(trainer, step):
                    rank.upload(step, lambda key=key: state_of(key, value), role=role)

    @rule(
        which=WHICH,
        ahead=st.integers(0, 1),
        kind=KIND,
        fails=RARELY,
        asks=OFTEN,
        pauses=st.booleans(),
        flow=FLOW,
    )
    @where(lambda self: self.trainers)
    def save_by_a_function(
        self, which: int, ahead: int, kind: str, fails: bool, asks: bool, pauses: bool, flow: str
    ) -> None:
        """Trinity's calls: ``save_async``, then ``register_and_monitor``.

        The function may write half of its file, and the rest once its commit waits for it.
        """
        trainer = self.living(which)
        self.open_run(trainer)
        step = trainer.step = trainer.step + ahead
        is_sync = kind == "state_dict"
        folder = f"global_step_{step}/own"
        text, save = f"{step} {trainer.config}", (trainer.run, step, kind)
        root, half, go_on = self.root, threading.Semaphore(0), threading.Event()
        called = []

        def write(name: str) -> None:
            called.append(name)
            if fails:
                raise OSError("the function fails")
            (root / folder).mkdir(parents=True, exist_ok=True)
            with (root / name).open("w") as file:
                file.write(text[:2])
                file.flush()
                half.release()
                go_on.wait(250)
                file.write(text[2:])

        def end() -> None:
            go_on.set()
            for thread in threading.enumerate():
                if thread.name == f"save-own-step{step}":
                    thread.join()

        self.end_functions()
        names = []
        for rank in trainer.ranks:
            name = f"{folder}/{next(self.numbers)}"
            with self.superseded_perhaps(trainer, step):
                rank.save_async("own", partial(write, name), step, is_state_dict=is_sync)
                names.append(name)
        if not names:
            return
        self.job.running = (save, end)
        for _ in names if pauses else ():
            half.acquire(timeout=0.2)
        if not (pauses and called):
            self.end_functions()
        self.see_displaced(trainer, step)
        self.model.functions[save] = dict.fromkeys(names, text)
        if not called and not self.model.superseded(trainer.run, step):
            there = self.model.steps[step]
            is_other = there.run != trainer.run or there.checkpoint_run
            assert is_other or {kind, "checkpoint"} & there.kinds, "it writes into no commit"
        there = self.model.steps.get(step)
        is_own = (
            there and there.run == trainer.run and kind in there.kinds and not there.checkpoint_run
        )
        if is_own and called:  # a sync of states alone may get files
            again = [*there.files, *there.kinds - {kind}]
            assert not again, f"step {step} is written to again"
        self.model.failed_functions.discard(save)
        if fails or not called:
            self.model.failed_functions.add(save)
        if asks:
            saved = Saved(trainer.key, trainer.run, step, kind, self.roles, {})
            earlier = self.model.of(trainer.run, step, kind)
            if step not in self.model.steps and any(each.committed for each in earlier):
                saved.excuse = "its flow run has ended, and its step has been removed since"
            self.model.saves.append(saved)
            for rank in trainer.ranks:
                try:
                    asyncio.run(
                        rank.register_and_monitor(step, is_sync, int(is_sync), int(not is_sync))
                    )
                except ConfigError:  # the step's states have failed, and are to be saved again
                    assert any(each.values and not each.committed for each in earlier)
                    saved.excuse = "the call has raised"
                else:
                    for steps in (trainer.saved, trainer.tried):
                        steps[kind] = max(step, steps.get(kind, 0))
            self.model.see_what_is_committed(step)
        self.stack_side(flow)

    @rule(which=WHICH, fails=OFTEN, kind=KIND)
    @where(lambda self: self.trainers and not self.server.away)
    def call_a_function_again(self, which: int, fails: bool, kind: str) -> None:
        """A save function fails or is committed, the training is told, and calls it again."""
        for ahead, each_fails in ((1, fails), (0, False)):
            how = {"asks": True, "pauses": False, "flow": "works"}
            self.save_by_a_function(which, ahead, kind, each_fails, **how)
            self.wait_all(self.living(which))

    @contextmanager
    def superseded_perhaps(self, trainer: Trainer, step: int) -> Iterator[None]:
        """Let a call be refused if a later run has superseded the step."""
        try:
            yield
        except SupersededError:
            assert self.model.superseded(trainer.run, step)

    def end_functions(self) -> None:
        """Let the functions that are running write the rest."""
        if self.running:
            self.running[1]()
            self.job.running = None

    def commit_waits(self, request: SaveRequest) -> None:
        """The functions of a step, of whatever run, end while its commit waits for them."""
        job = self.job_at(request.root)
        if not (job and job.running):
            return
        (_, step, kind), end = job.running
        if step == request.step and kind in SERVES_AS[request.kind]:
            self.ending = threading.Timer(0.02, end)
            self.ending.start()
            job.running = None

    def see_displaced(self, trainer: Trainer, step: int) -> None:
        """A superseded step may make way for a function; no kind is without a step by that."""
        there = self.model.steps.get(step)
        if there and step not in self.on_disk():
            assert there.run < trainer.run, "a run's own step is gone"
            assert self.model.superseded(there.run, step)
            assert step not in self.model.claimed
            kinds = self.model.newest().keys()
            del self.model.steps[step]
            self.job.newest = self.model.newest()
            assert kinds == self.job.newest.keys(), "nothing is left to resume from"

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
            for run, _ in self.server.begin_due():
                if what == "works twice":
                    self.server.begin(run)
            for run in list(self.server.runs.values()):
                while run.attempts:
                    for attempt in list(run.attempts):
                        self.do_task(run, attempt)

    @rule(which=WHICH, tasks=st.integers(1, 4))
    @where(lambda self: self.server.runs and not self.server.away)
    def begin_attempt(self, which: int, tasks: int) -> None:
        """A run is begun, or begun once more while it is under way, or retried."""
        runs = list(self.server.runs.values())
        run = runs[-1 - which % len(runs)]
        self.do_tasks(run, self.server.begin(run), tasks)

    @rule(which=WHICH, tasks=st.integers(0, 4), then=st.sampled_from([*5 * [""], "dies", "fails"]))
    @where(lambda self: self.under_way())
    def go_on(self, which: int, tasks: int, then: str) -> None:
        """An attempt gets some tasks further; then its worker is killed, or the disk is full."""
        attempts = self.under_way()
        run, attempt = attempts[which % len(attempts)]
        self.do_tasks(run, attempt, tasks)
        if then == "fails" and attempt in run.attempts:
            self.fail(run, attempt)
        elif then == "dies" and attempt in run.attempts:
            self.server.kill(run, attempt)

    def fail(self, run: FlowRun, attempt: Iterator[str]) -> None:
        """The next task of an attempt finds no space on the disk."""
        request = run.request
        if job := self.job_at(request.root):
            for saved in job.model.of(request.run, request.step, request.kind):
                saved.excuse = saved.excuse or "the disk was full"
        self.do_task(run, attempt, OSError(errno.ENOSPC, "No space left on device"))

    @rule(which=WHICH, kind=KIND, other=RARELY, attach=st.booleans())
    @where(lambda self: self.trainers and not self.server.away)
    def save_after_a_failure(self, which: int, kind: str, other: bool, attach: bool) -> None:
        """A save fails, the training is told, and submits the step again."""
        for what in ("sweeps", "works"):  # also what waited for a root that was away
            self.stack_side(what)
        trainer = self.living(which)
        for again in (False, True):
            told = len(self.raised[trainer.key])
            step = trainer.step + (not again)
            if again and other:  # the first submission is forgotten, but for what was attached
                trainer.computed[step] = other
                for key in [key for key in trainer.staged[1] if key[0] != "attachments"]:
                    del trainer.staged[1][key]
            how = {"other": other and again, "attach": attach}
            self.submit(trainer, step, kind, ("model", "optim"), **how)
            for run, attempt in self.server.begin_due() if not again else ():
                self.fail(run, attempt)
            self.stack_side("works")
            self.wait_all(trainer)
            count = 1 if kind == "checkpoint" else len(self.roles)
            saves = self.model.of(trainer.run, step, kind)[-count:]
            raised = self.raised[trainer.key][told:]
            assert f"step {step}" in raised or all(each.committed for each in saves), (
                f"step {step} has failed, and nobody is told; again: {again}, raised: {raised}"
            )

    def under_way(self) -> list[tuple[FlowRun, Iterator[str]]]:
        return [(run, each) for run in self.server.runs.values() for each in run.attempts]

    def do_tasks(self, run: FlowRun, attempt: Iterator[str] | None, most: int) -> None:
        for _ in range(most):
            if attempt in run.attempts:
                self.do_task(run, attempt)

    def do_task(self, run: FlowRun, attempt: Iterator[str], error: Exception | None = None) -> None:
        before, request = run.state, run.request
        turn, job = self.job, self.job_at(request.root)
        self.job = job or turn
        what = run.advance(attempt, error)
        if self.ending:
            self.ending.join()
            self.ending = None
        if currently_in_test_context():
            note(f"    run {request.run}, {request.kind} of step {request.step}: {what}")
        if job:
            self.see_task(run, before, what)
        else:
            assert what != "commit", f"{request.run_name} is committed without its root"
        self.job = turn

    def see_task(self, run: FlowRun, before: str, what: str) -> None:
        request = run.request
        if what == "commit":
            self.see_commit(request, before)
        elif what == "upload":
            self.see_copy(request)
        elif what == "prune" and self.root.exists():  # it may be unmounted for a moment
            stay = self.model.kept(last=self.keep_of(request) or 100, last_syncs=2)
            self.see_removal(stay | self.model.earlier(request.run))
        elif what.startswith("failed") and run.state == "failed" and not run.attempts:
            save = (request.run, request.step, request.kind, request.roles)
            refused = self.job.has_remote and "has the steps of another job" in run.message
            is_lost = self.model.is_lost(request.run, request.run_key)
            reason = refused or is_lost or self.model.reason_to_fail(*save)
            assert reason or request.identity != self.identity, f"{request.run_name}: {run.message}"

    def keep_of(self, request: SaveRequest) -> int:
        """What the processes of a save want to keep, as its manifest says."""
        found = manifest.read_run_manifest(self.root, request.run, request.step)
        return found.keep if found and request.kind == "checkpoint" else 0

    def see_commit(self, request: SaveRequest, state: str) -> None:
        """A flow run says that a save is committed: so it has to be, as it was submitted."""
        model, run, step, kind = self.model, request.run, request.step, request.kind
        what = f"{kind} of step {step}, run {run}"
        there = model.steps.get(step)
        saves = [each for each in model.of(run, step, kind) if each.roles == request.roles]
        done = state == "completed" or any(each.committed for each in saves)
        files = model.functions.get((run, step, kind), {})
        if there and there.run == run and kind in there.kinds and done:
            # an attempt after the commit: what functions wrote may join it, other images do not,
            # unless functions alone have committed it, which are of no role
            if files:
                there.kinds |= {kind, "state_dict"}
                there.files.update(files)
            if any(role in request.roles for role, *_ in there.values):
                return
        assert not model.is_lost(run, request.run_key), f"{what} is of a run that was lost"
        assert not model.superseded(run, step), f"{what} was superseded, and came back"
        assert not there or there.run <= run, f"{what} replaces that of a later run"
        found = self.loaded(step, {key for each in saves for key in each.values})
        for each in saves:
            model.forget_failed_sync(each, {*found})
        outcomes = [outcome for each in saves for outcome in model.outcomes(each)]
        found = self.loaded(step, {key for each in outcomes for key in each.values})
        fitting = [each for each in outcomes if self.expected(each) == found]
        assert fitting, f"{what} is committed, and {found} was never submitted"
        model.steps[step] = fitting[0]
        model.commits.setdefault(run, []).append(step)
        model.steps[step].files |= files
        model.see_what_is_committed(step)

    # ------------------------------------------------------------ steps that stay, and go

    @rule(which=WHICH, how=st.sampled_from(["pin", "tag", "lease", "no claim"]))
    @where(lambda self: self.model.steps)
    def claim(self, which: int, how: str) -> None:
        """A user claims a step, or no step."""
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
        elif how == "no claim":
            for claimed in (*self.model.pinned, *self.model.tags):
                unpin(self.root, claimed)
            for lease in self.leases.values():
                lease.release()
            for claims in (self.model.pinned, self.model.tags, self.model.leased, self.leases):
                claims.clear()

    @rule(last=st.integers(1, 3), last_syncs=st.integers(1, 2))
    @where(lambda self: self.model.steps)
    def prune(self, last: int, last_syncs: int) -> None:
        """``trinity-sync prune --keep last=... --keep-weights last=...``"""
        self.remove_all_but(last, last_syncs)
        self.see_removal(self.model.kept(last=last, last_syncs=last_syncs))

    def remove_all_but(self, last: int, last_syncs: int) -> None:
        rules = Rules(parse_policy(f"last={last}"), parse_policy(f"last={last_syncs}"))
        prune(self.root, plan_prune(self.root, rules, time.time()), spool=self.settings.spool)

    def see_removal(self, stay: set[int]) -> None:
        left = self.on_disk()
        assert stay <= left, f"steps {sorted(stay - left)} were removed"
        steps = self.model.steps
        self.model.steps = {step: steps[step] for step in steps if step in left}

    @rule(which=WHICH)
    @where(lambda self: self.model.steps)
    def go_back(self, which: int) -> None:
        """``trinity-sync rewind --force``"""
        step = sorted(self.model.steps)[which % len(self.model.steps)]
        if self.job.has_remote or self.model.newer(step) & self.model.leased:
            with pytest.raises((StepInUseError, ConfigError)):
                rewind(self.root, step, force=True)
            return
        rewind(self.root, step, force=True)
        self.model.rewind(step)
        self.job.newest = self.model.newest()  # this was asked for

    # ------------------------------------------------------------ what also happens to a node

    @property
    def job_spool(self) -> Path:
        return self.observer.spool.folder

    @rule(what=st.sampled_from(["spool vanishes", "spool is copied", "older spool", "fork"]))
    @where(lambda self: self.job_spool.exists())
    def mishap(self, what: str) -> None:
        """/dev/shm is emptied or copied, an older client is there, a process is forked."""
        if what == "spool vanishes":
            shutil.rmtree(self.job_spool)
            self.model.commits.clear()  # the node has noted no commit any longer
            self.images = {name: each for name, each in self.images.items() if each[0] != self.job}
            for saved in self.model.saves:
                saved.excuse = saved.excuse or "the spool has vanished"
            for trainer in self.trainers.values():
                trainer.lost = trainer.staged[0]
        elif what == "spool is copied":
            shutil.copytree(self.job_spool, self.spool / "copy", dirs_exist_ok=True)
        elif what == "older spool":
            other = self.spool / "older-1a2b3c4d"
            other.mkdir(mode=0o700, exist_ok=True)
            owner = encode_body({"format": SPOOL_FORMAT - 1, "root": str(self.observer.root)})
            (other / "job.json").write_text(owner)
            (other / "actor.model.rank0.0.slot.ticket").write_text(encode_body({"step": 3}))
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
            key: [repr(value).encode(), b"always"]
            if key[0] == "attachments"
            else comparable(state_of(key, value))
            for key, value in step.values.items()
        }

    def loaded(
        self, step: int, keys: set[Key], root: Path | None = None, **spool: Any
    ) -> dict[Key, Any]:
        """All that can be loaded of a step, for the roles and ranks of ``keys``."""
        found: dict[Key, Any] = {}
        for role, rank in {(role, rank) for role, _, rank in keys}:
            with suppress(TrinitySyncError):
                if role == "attachments":
                    names = ("note", "constant")
                    notes = [self.observer.attachment(step, name, rank=rank) for name in names]
                    found[role, role, rank] = notes
                    continue
                where = {"rank": rank, "world_size": self.world_size}
                states = load_states(root or self.root, step, role, **where, **spool)
                found |= {(role, part, rank): comparable(states[part]) for part in states}
        return found

    def on_disk(self, root: Path | None = None) -> set[int]:
        found = (root or self.root).glob("global_step_*/manifest.json")
        names = [path.parent.name for path in found]
        return {int(name.removeprefix("global_step_")) for name in names}

    def tickets(self) -> dict[str, dict[str, Any]]:
        """The images that wait, by slot; of all jobs."""
        found = {}
        for job in self.jobs:
            for path in job.observer.spool.folder.glob("*.slot.ticket"):
                with suppress(FileNotFoundError):  # the trainer's thread has just freed the slot
                    found[str(path).removesuffix(".ticket")] = json.loads(path.read_text())
        return {slot: body for slot, body in found.items() if "image" in body}

    def note_images(self, saved: Saved) -> None:
        for slot, body in self.tickets().items():
            if Path(slot).parent != self.job_spool:
                continue
            role = "attachments" if body["component"] == "attachments" else body["role"]
            key = (role, body["component"], body["rank"])
            whose = (body["run"], body["step"], body["kind"])
            is_its = body["run_key"].partition(".")[0] == saved.trainer
            if is_its and whose == (saved.run, saved.step, saved.kind) and key in saved.values:
                image = (self.job, slot, saved.step, key, saved.values[key])
                self.images.setdefault(body["image"], image)

    # ------------------------------------------------------------ the promises

    @invariant()
    def promises_hold(self) -> None:
        """Compare, after every rule, what is there with the model."""
        self.a_committed_step_is_what_was_submitted()
        self.the_newest_of_a_kind_never_falls()
        self.a_pointer_names_a_committed_step_of_its_kind()
        assert self.model.claimed <= set(self.model.steps), "a claimed step is gone"
        self.no_image_goes_before_it_is_committed()
        self.readers_hold_what_is_newest()

    def a_committed_step_is_what_was_submitted(self) -> None:
        assert self.on_disk() == set(self.model.steps)
        for step, each in self.model.steps.items():
            found_now = self.root.glob(f"global_step_{step}/**/*")
            # a trainer's thread may just be replacing the manifest and its parts
            passing = (TEMPORARY_SUFFIX, ".json")
            files = sorted(path for path in found_now if path.suffix not in passing)
            files.append(self.root / f"global_step_{step}/manifest.json")
            seen = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
            if self.looked_at.get(step) != seen:
                found = self.loaded(step, set(each.values))
                assert found == self.expected(each), f"step {step} is not what was submitted"
                own = {path: (self.root / path).read_text() for path in each.files}
                assert own == each.files, f"files of step {step} are not what functions wrote"
                self.looked_at[step] = seen

    def the_newest_of_a_kind_never_falls(self) -> None:
        now = self.model.newest()
        for kind, age in self.newest.items():
            assert now.get(kind, (0, 0)) >= age, f"the newest {kind} was {age} (run, step)"
        self.job.newest = now
        for kind, (_, step) in now.items():
            found = self.observer.latest_step(kind, settle_s=0)
            assert found == step, f"latest_step({kind}) is {found}"

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
            job, slot, step, key, value = self.images.pop(image)
            if any(slot in message for message in self.log.messages):
                for saved in job.model.saves:
                    if saved.step == step and saved.values.get(key) == value:
                        saved.excuse = saved.excuse or "its image was evicted"
            else:
                assert (step, key, value) in job.model.ever, f"{key} of step {step} was dropped"
        self.log.messages.clear()

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        try:
            if not sys.exc_info()[0]:  # otherwise the example has failed before
                self.every_save_comes_to_an_end()
        finally:
            with self.open:
                for job in self.jobs:
                    if job.running:  # they would write into the spool after its removal
                        job.running[1]()
                    for trainer in job.trainers.values():
                        participant = trainer.participant
                        for rank in (
                            *trainer.ranks,
                            *([participant._saves] if participant else ()),
                        ):
                            rank.close(timeout=0)
                    for lease in job.leases.values():
                        lease.release()
                    job.trainers.clear()
            gc.collect()

    def every_save_comes_to_an_end(self) -> None:
        """Each save is committed, superseded, or has failed with a report."""
        self.server.come_back()
        for what in ("works", "sweeps", "works"):
            self.stack_side(what)
        for job in self.jobs:
            self.job = job
            if self.model.runs:
                self.every_save_of_the_job_comes_to_an_end()

    def every_save_of_the_job_comes_to_an_end(self) -> None:
        for trainer in self.trainers.values():
            self.wait_all(trainer)
        self.looked_at.clear()
        self.promises_hold()
        self.the_remote_has_what_was_committed()
        for step, each in self.model.steps.items():
            found = self.loaded(step, set(each.values), spool=self.observer.spool)
            assert found == self.expected(each), f"step {step} is not what was submitted"
        alive = {trainer.key for trainer in self.trainers.values()}
        for saved in self.model.saves:
            if saved.committed or self.model.superseded(saved.run, saved.step):
                continue
            its = (saved.run, saved.step, saved.kind, saved.roles)
            assert self.model.reason_to_fail(*its), f"it is not committed: {saved}"
            told = f"step {saved.step}" in self.raised[saved.trainer]
            if saved.trainer not in alive:  # then it is in the log, or in the Prefect UI
                its = (saved.run, saved.step, saved.kind)
                runs = self.server.runs.values()
                failed = [run.request for run in runs if run.state == "failed"]
                told |= bool(saved.excuse)
                told |= its in {(each.run, each.step, each.kind) for each in failed}
                images = [each for each in self.images.values() if each[0] == self.job]
                slots = [slot for _, slot, step, *_ in images if step == saved.step]
                told |= any(Path(f"{slot}.failed").exists() for slot in slots)
            assert told, f"its failure was not reported: {saved}"


class PromisesOfSaver(Promises):
    """The jobs of a node without a stack."""

    saver = "built-in"

    def make_server(self) -> Server:
        return Node(self.spool, self.commit_waits)

    def wait_all(self, trainer: Trainer) -> None:
        """Wait, if not for what a spool has taken with it: not all of that is told."""
        try:
            super().wait_all(trainer)
        except SaveTimeoutError as error:
            lost = [each for each in self.model.saves if each.excuse == "the spool has vanished"]
            if not lost:
                raise
            self.raised[trainer.key] += f"{error}: {[f'step {each.step}' for each in lost]}\n"


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


def each_start_is_a_process(patch: pytest.MonkeyPatch) -> None:
    """A process takes its own earlier runs over; here each run is to be that of another one."""
    patch.setattr(run_context, "_living", type("Empty", (set,), {"add": lambda *_: None})())
    patch.setattr(living_run, "WAIT_S", 0.0)


MINUTES = float(os.environ.get("PROMISES_MINUTES") or 0)
HOW = settings(
    max_examples=int(os.environ.get("PROMISES_EXAMPLES") or 60),
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=not MINUTES,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, *([Phase.shrink] if "PROMISES_AT_ONCE" not in os.environ else [])],
)


@pytest.mark.timeout(900 + 60 * MINUTES)
@pytest.mark.parametrize("jobs", [Promises, pytest.param(PromisesOfSaver, marks=pytest.mark.slow)])
def test_the_promises_hold_whatever_happens_to_a_job(
    jobs: type[Promises], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_catalog_and_pages(monkeypatch)
    each_start_is_a_process(monkeypatch)
    monkeypatch.setattr(watcher_module, "LOOK_S", (0.005, 0.005))
    monkeypatch.setattr(watcher_module, "OTHERS_LOOK_S", 0.005)
    end = time.monotonic() + 60 * MINUTES
    try:
        while True:
            if MINUTES:
                chosen = int(os.environ.get("PROMISES_SEED") or secrets.randbelow(2**32))
                print(f"PROMISES_SEED={chosen}", file=sys.__stdout__, flush=True)
                seed(chosen)(jobs)
            run_state_machine_as_test(jobs, settings=HOW)
            if time.monotonic() >= end:
                break
    finally:
        gc.unfreeze()
