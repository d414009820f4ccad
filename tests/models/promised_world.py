"""What surrounds a job: its root, other jobs, evaluators and readers; rules of `test_promises`.

A user removes, moves or copies a root, and the training starts again; a second job has the same
spool; an evaluator asks; readers follow.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.models.promised import Key, Model, Run, Value
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.init_root import set_job_settings
from trinity_sync.client.participant import STATE, Participant
from trinity_sync.errors import CommitError, ConfigError, RootInUseError, WeightSyncError
from trinity_sync.remote.download import fetch
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.steps_in_use import Lease
from trinity_sync.weights.folder.reader import FolderReader
from trinity_sync.weights.folder.writer import WeightFolder
from trinity_sync.weights.reader import WeightReader

OFTEN = st.sampled_from([True, True, True, False])
RARELY = st.sampled_from([False] * 7 + [True])


def where(holds: Callable[[Any], object]) -> Callable[..., Callable[..., None]]:
    """Have a rule do nothing where it does not apply.

    Hypothesis' `precondition` has it draw another rule instead. What threads of the product have
    done by then may decide that, and a life that is drawn again would differ.
    """

    def decorate(do: Callable[..., None]) -> Callable[..., None]:
        @wraps(do)
        def do_where_it_applies(self: Any, *drawn: Any, **named: Any) -> None:
            if holds(self):
                do(self, *drawn, **named)

        return do_where_it_applies

    return decorate


def state_of(key: Key, value: Value) -> dict[str, Any]:
    """What training has at a step: the same again from the same configuration, unless otherwise."""
    step, config, other, job = value
    return {
        "config": "long " * config,
        "lr": 1 / (1 + step // 8 + other),
        "lora_bias": torch.full((5,), float(step)),
        "lora_weights": torch.tensor([step, config, other, key[2], job], dtype=torch.float32),
        "of": "{} {} {}".format(*key),
    }


def comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    state = state.get(STATE, state)  # of a participant
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
    saved: dict[str, int] = field(default_factory=dict)
    """The last step that was saved, by kind; and that of the last call, which may have raised."""
    tried: dict[str, int] = field(default_factory=dict)
    lost: int = -1
    """The step of which part has vanished with the spool."""
    participant: Participant | None = None
    """The process of the role critic that cuts ask."""


@dataclass(eq=False)
class Job:
    """A job, from its first start until its root is removed, and its model."""

    root: Path
    number: int
    observer: CheckpointCoordinator
    model: Model = field(default_factory=Model)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    """What the calls of each trainer have raised."""
    leases: dict[int, Lease] = field(default_factory=dict)
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_remote: bool = False
    """Whether its checkpoints count only once the remote has them."""
    followed: tuple[int, int] = (0, 0)
    """Run and step of the weights that its readers hold."""
    looked_at: dict[int, object] = field(default_factory=dict)
    """The files of the steps that were loaded and compared."""
    backup: tuple[Path, Model] | None = None
    running: tuple[tuple[int, int, str], Callable[[], None]] | None = None
    """The save whose functions are writing, and what lets them end."""

    @property
    def identity(self) -> str:
        """What distinguishes the job from others that its path has had."""
        return json.loads((self.root / ".trinity_sync" / "identity.json").read_text())["identity"]


@dataclass
class Readers:
    """A reader of the weights at a root, a folder of weights that it publishes, and its reader."""

    near: WeightReader
    folder: WeightFolder
    far: FolderReader


class World:
    """Rules of what surrounds a job."""

    def begin_job(self, root: Path, *, saves: int = 0, loads: str = "nothing", **has: Any) -> None:
        """Begin a job at a root, which may have steps, and start its training."""
        observer = self.coordinator(root)
        self.job = Job(root, next(self.numbers), observer, **has)
        self.job.has_remote = bool(read_job_settings(root).required_remote)
        self.jobs = [each for each in self.jobs if each.root != root] + [self.job]
        self.start("A", loads, 0, config=False, syncs=False, saves=saves, keep=0)
        if saves and self.a_remote:
            self.name_the_remote()

    def coordinator(self, root: Path, **options: Any) -> CheckpointCoordinator:
        """Make a coordinator; a job that names the remote of another one is refused first."""
        trigger = self.server.make_trigger(self.settings)
        options |= {"settings": self.settings, "trigger": trigger}
        try:
            return CheckpointCoordinator(root, **options)
        except ConfigError as error:
            if "has the steps of another job" not in str(error):
                raise
        set_job_settings(root, {"remote": "", "remote_required": False})
        if job := self.job_at(root):
            job.has_remote = False
        return CheckpointCoordinator(root, **options)

    def job_at(self, root: str | Path) -> Job | None:
        return next((job for job in self.jobs if job.root == Path(root)), None)

    def end_job(self) -> None:
        """All processes of the job end, and it is forgotten."""
        for name in list(self.trainers):
            self.stop(name, "SIGKILL")
        for lease in self.leases.values():
            lease.release()
        self.images = {name: image for name, image in self.images.items() if image[0] != self.job}
        self.jobs.remove(self.job)

    @rule(
        what=st.sampled_from(["removed", "moved", "copied"]),
        works=st.booleans(),
        saves=st.integers(0, 2),
    )
    @where(lambda self: self.model.saves)
    def root_changes(self, what: str, works: bool, saves: int) -> None:
        """A user removes, moves or copies the root, and the training starts again."""
        root, elsewhere = self.root, self.folder / f"ckpts{next(self.numbers)}"
        model, raised = deepcopy(self.model), dict(self.raised)
        model.leased.clear()
        model.saves = [saved for saved in model.saves if saved.committed]
        if what == "copied":
            shutil.copytree(root, elsewhere, ignore=shutil.ignore_patterns("leases"))
        else:
            self.end_job()
            root.rename(elsewhere)
        if what == "removed":
            shutil.rmtree(elsewhere)
        if works:
            self.stack_side("works")
            self.stack_side("sweeps")
        if what == "removed":
            self.begin_job(root, saves=saves)
        else:
            has = {"model": model, "raised": raised}
            self.begin_job(elsewhere, saves=saves, loads="load", **has)

    def back_up(self) -> None:
        """Make a backup of the root in the midst of the training, with no half-written files.

        Of a function they would be committed: no status tells what it had written.
        """
        self.end_functions()
        backup = self.folder / f"backup{next(self.numbers)}"
        shutil.copytree(self.root, backup, ignore=shutil.ignore_patterns("leases", "*.tmp"))
        self.job.backup = backup, deepcopy(self.model)

    @rule(
        waits=RARELY,
        restarts=st.booleans(),
        trains=st.sampled_from(["works", "has no turn yet"]),
        settles=st.booleans(),
        saves=st.integers(0, 2),
        loads=OFTEN,
    )
    @where(lambda self: self.model.saves and self.trainers and not self.job.has_remote)
    def restore(
        self, waits: bool, restarts: bool, trains: str, settles: bool, saves: int, loads: bool
    ) -> None:
        """The root is replaced by its backup, and the training starts again.

        The backup may be of now, of before what is trained now, or of long ago.
        """
        if not self.job.backup:
            self.back_up()
            if waits:
                return
        if restarts:
            self.start("A", "load", 0, False, False, 0, keep=0)
        self.train(1, "checkpoint", 0, trains)
        self.train(1, "checkpoint", 0, "has no turn yet")
        for name in list(self.trainers):
            self.stop(name, "SIGKILL")
        for lease in self.leases.values():
            lease.release()
        self.leases.clear()
        shutil.rmtree(self.root)
        shutil.copytree(self.job.backup[0], self.root)
        self.job.model = self.model.restore(self.job.backup[1])
        self.begin_again()
        for what in (
            ("sweeps", "works") if settles else ()
        ):  # as a start that waits for what is left
            self.stack_side(what)
        self.start("A", "load" if loads else "nothing", 0, False, False, saves, keep=0)
        for what in ("sweeps", "works"):
            self.stack_side(what)

    def begin_again(self) -> None:
        """Have what was found in the root count no longer, and what is trained be distinct."""
        self.job.number, self.job.followed = next(self.numbers), (0, 0)
        self.job.newest = self.model.newest()
        self.looked_at.clear()
        self.images = {name: image for name, image in self.images.items() if image[0] != self.job}

    @rule(saves=st.integers(0, 2))
    @where(lambda self: self.a_remote and self.trainers and not self.server.away)
    def disk_is_lost(self, saves: int) -> None:
        """The root is lost and pulled anew from its remote, and the training starts again."""
        if not self.copied:
            self.name_the_remote()
            self.train(1, "checkpoint", 0, "works")
        if not (self.job.has_remote and self.identity == self.copier and self.copied):
            return
        root, model, raised = self.root, self.model, dict(self.raised)
        self.end_job()
        shutil.rmtree(root)
        manifest, _ = fetch(self.remote.as_uri(), None, root)
        run, step = manifest.run, manifest.step
        assert (run, step) == max((each.run, step) for step, each in self.copied.items())
        made = Model(runs=[*model.runs[: run - 1], Run("fetched", step, loaded=True)])
        made.steps[step] = deepcopy(self.copied[step])
        made.weights = {key: each for key, each in model.weights.items() if key == (run, step)}
        made.see_what_is_committed(step)
        self.begin_job(root, saves=saves, loads="load", model=made, raised=raised)

    @rule()
    @where(lambda self: self.model.saves and not self.job.running)
    def root_is_away(self) -> None:
        """The root is unmounted for a moment, while what commits looks at it."""
        self.root.rename(away := self.folder / "away")
        for what in ("works", "sweeps"):
            self.stack_side(what)
        away.rename(self.root)

    @rule(saves=st.integers(0, 2))
    def turn_to_the_other_job(self, saves: int) -> None:
        """A second job of the node, with the same spool."""
        if len(self.jobs) > 1:
            self.job = self.jobs[0]
            self.jobs = [*self.jobs[1:], self.job]
        else:
            self.begin_job(self.folder / "other", saves=saves)

    @rule(how=st.sampled_from(["load", "record_metrics", "coordinator", "refused"]))
    def evaluate(self, how: str) -> None:
        """A process that only asks: nothing of the job changes."""
        newest = self.model.newest().get("checkpoint")
        if how in ("load", "record_metrics"):
            asks: Any = Checkpoints(self.root)
        else:
            asks = self.coordinator(self.root, world_size=self.world_size, roles=self.roles)
            self.open.callback(asks.close, timeout=0)
        settle = {} if isinstance(asks, Checkpoints) else {"settle_s": 0.0}
        assert asks.latest_step(**settle) == (newest[1] if newest else None)
        if newest and how == "record_metrics":
            self.recorded[number := next(self.numbers)] = self.model.steps[newest[1]]
            asks.record_metrics(newest[1], {"reward": number})
        elif newest and how == "load":
            with suppress(CommitError):  # of functions, or of components alone
                asks.load(newest[1], world_size=self.world_size)
        elif newest and how == "refused" and self.is_living():
            with pytest.raises(RootInUseError):
                asks.load(newest[1])

    def is_living(self) -> bool:
        """Whether a process is part of the newest run."""
        newest = self.model.newest_start()
        return any(0 < each.run == newest for each in self.trainers.values())

    @rule()
    @where(lambda self: self.root not in self.readers)
    def make_readers(self) -> None:
        """Rollout workers read the newest weights, some from a folder that one of them publishes.

        From then on they follow the root.
        """
        adapter, out = self.folder / "adapter", self.folder / f"weights of {self.root.name}"
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text("{}")
        near = WeightReader(root=self.root, role=self.roles[0], name="explorer", timeout_s=0)
        self.open.callback(near.close)
        self.readers[self.root] = Readers(near, WeightFolder(out, adapter), FolderReader(out))

    def readers_hold_what_is_newest(self) -> None:
        """Weights of the job that the root has now, complete, and never older than before."""
        if self.root not in self.readers:
            return
        readers = self.readers[self.root]
        newest = self.model.newest_weights(self.roles[0])
        if self.model.superseded(*self.followed):
            self.job.followed = 0, 0  # what was superseded since gives way
        try:
            with readers.near.open() as view:
                age, tensors = (view.version.run, view.version.step), dict(view.iter_tensors())
                several = len({*self.model.weights.get(age, ())}) > 1
                with suppress(*([ConfigError] if several else [])):
                    readers.folder.publish(view)  # refused if the step had other weights before
        except WeightSyncError:
            if (0, 0) < newest >= self.followed:
                raise
            return
        assert age >= max(newest, self.followed), f"{age} is older than {newest} {self.followed}"
        assert not self.model.superseded(*age), f"{age} is superseded"
        self.job.followed = age
        key = (self.roles[0], "model", 0)
        found = {name: tensor.tolist() for name, tensor in tensors.items()}
        expected = [
            {name: each.tolist() for name, each in state_of(key, value).items() if "lora" in name}
            for value in self.model.weights.get(age, ())
        ]
        assert found in expected, f"{age} is {found}"
        far = {name: each.tolist() for name, each in readers.far.load().items()}
        assert far in expected
        assert (readers.far.version.run, readers.far.version.step) == age

    @rule()
    @where(lambda self: self.a_remote)
    def name_the_remote(self) -> None:
        """All jobs of the node are told to copy their checkpoints to one remote."""
        for job in self.jobs:
            if job.model.runs:  # otherwise it would go on with the job that is there
                changes = {"remote": self.remote.as_uri(), "remote_required": True}
                set_job_settings(job.root, changes)
                job.has_remote = True

    def see_copy(self, request: SaveRequest) -> None:
        """A flow run says that a remote has a checkpoint: only one job ever copies any there."""
        self.copier = self.copier or request.identity
        assert self.copier == request.identity, "the remote has the steps of two jobs"
        self.the_remote_has_what_was_committed()

    def the_remote_has_what_was_committed(self) -> None:
        for step in self.on_disk(self.remote):
            here = self.model.steps.get(step) if self.identity == self.copier else None
            copies = [each for each in (here, self.copied.get(step)) if each]
            keys = {key for each in copies for key in each.values if key[0] != "attachments"}
            found = self.loaded(step, keys, self.remote)
            fitting = [each for each in copies if found.items() <= self.expected(each).items()]
            assert fitting, f"the copy of step {step} is {found}"
            self.copied[step] = deepcopy(fitting[0])
