"""What others do beside the trainers of a job; rules of `test_promises`.

Evaluators ask again for what they found earlier, a participant saves its part of a checkpoint,
another user of the root's group makes links of its names.
"""

import os
import shutil
import threading
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.models.promised import Key, Saved, Step, Value
from tests.models.promised_world import comparable, state_of, where
from tests.support.disk import look
from trinity_sync.client.checkpoints import Checkpoints
from trinity_sync.client.participant import Participant
from trinity_sync.errors import CommitError, SaveError, TrinitySyncError
from trinity_sync.fs.atomic import remove_tree
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.manifest import read_run_manifest

WHICH = st.integers(0, 5)
ANOTHER_USER = 12345
NAMES = st.sampled_from(
    [
        *("", "runs", "placements", "pins", "leases", "metrics", "stored", "journal", "weights"),
        *("spare", "attaching", "replacing", "trash", "fetching", "quarantine", "cuts"),
        *("identity.json", "job.json", "commit.lock", "removal.lock", "functions.lock"),
        *("saves.jsonl", "runs/1.json", "pins/best.json", ".now", "../global_step_1"),
    ]
)
"""Folders and records below the private folder, and a step."""


@dataclass
class Evaluator:
    """A process that has found steps of a root, and what they were."""

    asks: Checkpoints
    found: dict[int, Step]


class Others:
    """Rules of what happens beside the trainers of a job."""

    # ------------------------------------------------------------ evaluators

    @rule(lists=st.booleans(), restarts=st.booleans(), records=st.booleans())
    @where(lambda self: self.model.steps)
    def an_evaluator_finds_steps(self, lists: bool, restarts: bool, records: bool) -> None:
        """A process that evaluates steps lists them; a restart may save their numbers again."""
        asks = Checkpoints(self.root)
        found = asks.steps() if lists else [asks.latest_step()]
        checkpoints = {
            step for step, each in self.model.steps.items() if "checkpoint" in each.kinds
        }
        assert {*found} - {None} <= checkpoints
        known = {step: deepcopy(self.model.steps[step]) for step in found if step is not None}
        evaluators = self.evaluators.setdefault(self.root, [])
        evaluators[:] = [*evaluators[-2:], Evaluator(asks, known)]
        if restarts and known:
            self.start("A", "load", 1, config=False, syncs=False, saves=2, keep=0)
            for which in range(2):
                self.an_evaluator_goes_on(which, "records" if records else "loads")

    @rule(which=WHICH, how=st.sampled_from(["loads", "records", "records", "finds again"]))
    @where(lambda self: any(each.found for each in self.evaluators.get(self.root, ())))
    def an_evaluator_goes_on(self, which: int, how: str) -> None:
        """It acts on the step that it found, or on none: never on another run's of the number."""
        known = [each for each in self.evaluators[self.root] if each.found]
        evaluator = known[-1 - which % len(known)]
        step = sorted(evaluator.found)[-1 - which % len(evaluator.found)]
        was, now = evaluator.found[step], self.model.steps.get(step)
        is_same = bool(now and now.run == was.run and is_part(was, now))
        where = f"step {step} of run {was.run}, and there is {now and now.run}"
        if how == "loads":
            try:
                found = evaluator.asks.load(step, world_size=self.world_size)
            except CommitError:
                keys = [key for key in was.values if key[0] == "actor" and key[1] != "attachments"]
                assert not (is_same and keys), where
            else:
                assert is_same, where
                own = {("actor", part, 0): comparable(found[part]) for part in found}
                assert own.items() <= self.expected(now).items(), where
        elif how == "records":
            number = next(self.numbers)
            self.recorded[number] = was
            try:
                evaluator.asks.record_metrics(step, {"reward": number})
            except CommitError:
                assert not is_same, where
            else:
                assert is_same or not now, where
        elif (latest := evaluator.asks.latest_step()) is not None:
            evaluator.found[latest] = deepcopy(self.model.steps[latest])
        self.metrics_are_of_what_was_evaluated()

    def metrics_are_of_what_was_evaluated(self) -> None:
        for step, now in self.model.steps.items():
            if reward := Checkpoints(self.root).metrics(step).get("reward"):
                was = self.recorded[int(reward)]
                assert is_part(was, now), f"step {step} of run {now.run} has metrics of {was.run}"

    # ------------------------------------------------------------ participants

    @rule(which=WHICH, answers=st.permutations(["in time", "late", "never"]))
    @where(lambda self: len(self.roles) > 1 and self.world_size == 1)
    def cuts(self, which: int, answers: list[str]) -> None:
        """A participant has the role critic: it saves its state while the trainer waits, or not."""
        trainer = self.living(which) if self.trainers else None
        step = trainer.step + 1 if trainer else 0
        if not trainer or (trainer.run and self.model.superseded(trainer.run, step)):
            self.start("A", "load", 0, config=False, syncs=False, saves=0, keep=0)
            trainer = self.trainers["A"]
        self.open_run(trainer)
        for each in answers:
            self.cut(trainer, each)

    def cut(self, trainer: Any, answers: str) -> None:
        step = max(trainer.step, trainer.tried.get("checkpoint", 0)) + 1
        if self.small_spool or self.model.superseded(trainer.run, step):
            return
        (rank,) = trainer.ranks
        value: Value = (step, trainer.config, trainer.computed.setdefault(step, False), self.number)
        values: dict[Key, Value] = {("actor", part, 0): value for part in ("model", "optim")}
        key: Key = ("critic", "extra_state", 0)
        rank.begin()
        part, over, told = self.participant(trainer), threading.Event(), []

        def answer() -> None:
            if answers != "never" and (asked := part.wait_cut(60)) is not None:
                over.wait(60 if answers == "late" else 0)
                with suppress(SaveError):  # of the first save
                    handle = part.save(asked, state_of(key, value))
                    told.extend([] if handle.failure else [asked])

        participant = threading.Thread(target=answer)
        participant.start()
        with suppress(SaveError):
            rank.cut(step, timeout_s=250 if answers == "in time" else 0.1)
        over.set()
        participant.join()
        assert told == ([step] if answers == "in time" else []), f"{answers}: {told}"
        trainer.step = trainer.tried["checkpoint"] = trainer.saved["checkpoint"] = step
        its = {each: state_of(each, value) for each in values}
        handle = rank.save(step, {each[1]: its[each] for each in its})
        excuse = "" if answers == "in time" else "the participant has not saved"
        if answers == "in time":
            assert not handle.failure, handle.failure
            values[key] = value
        self.raised[trainer.key] += f"step {step}: {handle.failure}\n" if handle.failure else ""
        self.model.weights.setdefault((trainer.run, step), []).append(value)
        trainer.staged = (step, dict(values))
        saved = Saved(trainer.key, trainer.run, step, "checkpoint", self.roles, values, excuse)
        self.model.saves.append(saved)
        self.note_images(saved)
        self.stack_side("works")

    def participant(self, trainer: Any) -> Participant:
        if not trainer.participant:
            self.coordinator(self.root).close(timeout=0)  # drops the remote of another job
            where = {"role": "critic", "roles": self.roles, "run_key": trainer.key}
            trainer.participant = Participant(self.root, settings=self.settings, **where)
        return trainer.participant

    # ------------------------------------------------------------ another user

    @rule(
        name=NAMES,
        how=st.sampled_from(["link", "link", "file"]),
        then=st.sampled_from(["works", "works twice", "sweeps", "goes on"]),
    )
    @where(lambda self: self.model.saves and not self.job.running and not os.geteuid())
    def another_user_writes(self, name: str, how: str, then: str) -> None:
        """Another user of the root's group has a link or a file in the place of a name meanwhile.

        What it leads to stays as it is; afterwards all that was committed is there.
        """
        path = Path(os.path.normpath(self.root / PRIVATE_FOLDER / name))
        if not path.parent.exists():
            return
        private, moved = self.folder / f"private{next(self.numbers)}", self.root / "moved"
        (shutil.copytree if path.is_dir() else shutil.copy)(path, private) if path.exists() else (
            private.mkdir()
        )
        if existed := os.path.lexists(path):
            path.rename(moved)
        path.symlink_to(private) if how == "link" else path.write_text("{}")
        os.chown(path, ANOTHER_USER, ANOTHER_USER, follow_symlinks=False)
        before = look(private)
        for saved in self.model.saves:
            saved.excuse = saved.excuse or "another user has written into the root"
        try:
            self.meanwhile(then)
            assert look(private) == before, f"{name} leads elsewhere, where {then} changes files"
        finally:
            remove_tree(path)
            if existed:
                moved.rename(path)
        self.see_late_commits()

    def meanwhile(self, then: str) -> None:
        if then == "goes on":
            for run, attempt in self.under_way():
                self.do_tasks(run, attempt, 1)
        else:
            self.stack_side(then)
        with suppress(OSError, TrinitySyncError):
            self.remove_all_but(1, 1)

    def see_late_commits(self) -> None:
        """See the commits of saves that have failed after them, and the removals before."""
        for run in self.server.runs.values():
            request = run.request
            if run.state == "failed":  # what worker and saver try for minutes
                run.tell("failed")
            if self.job_at(request.root) is self.job and request.identity == self.identity:
                found = read_run_manifest(self.root, request.run, request.step)
                there = self.model.steps.get(request.step)
                if found and not (there and there.run == found.run):
                    self.see_commit(request, run.state)
        self.see_removal(self.model.kept(last=1, last_syncs=1))


def is_part(was: Step, now: Step) -> bool:
    """Whether a step has all that it had."""
    return was.values.items() <= now.values.items() and was.files.items() <= now.files.items()
