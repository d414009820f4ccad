"""What the documentation promises of a job, as a model of a few dictionaries.

It shares no code with the product: not its order of runs, not its choice of the newest step, not
its policies. All of it is written from README.md, docs/operations/failures.md and
docs/how-to/retention.md.
"""

from copy import deepcopy
from dataclasses import dataclass, field

Key = tuple[str, str, int]
"""Role, component and rank."""
Value = tuple[int, bool, bool, int]
"""Step, the trainer's configuration, whether the step came out otherwise than usual, and which job
of all that this root has had."""


@dataclass
class Run:
    """A start of the job, or a rewind, in the order of their numbers."""

    who: object
    begins_at: int = 0
    loaded: bool = False
    back_to_run: int = 0
    """The run whose step it has loaded; 0 if it has loaded none."""


@dataclass
class Step:
    """What is committed at a step."""

    run: int
    kinds: set[str]
    values: dict[Key, Value]
    files: dict[str, str] = field(default_factory=dict)
    """What functions wrote into them."""
    checkpoint_run: int = 0
    """The earlier run whose checkpoint a sync has left in place."""


@dataclass
class Saved:
    """A save: what the ranks of a run have submitted of a step."""

    trainer: str
    run: int
    step: int
    kind: str
    roles: tuple[str, ...]
    values: dict[Key, Value]
    excuse: str = ""
    """Why it need not be committed."""
    committed: bool = False
    of_sync: frozenset[Key] = frozenset()
    """What a sync of the step has submitted, and this save has not: it may fail with the sync."""


@dataclass
class Model:
    """A job as its users know it."""

    runs: list[Run] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    saves: list[Saved] = field(default_factory=list)
    ever: set[tuple[int, Key, Value]] = field(default_factory=set)
    """All that was committed at any time."""
    functions: dict[tuple[int, int, str], dict[str, str]] = field(default_factory=dict)
    """What saves by functions write into which files, by run, step and kind."""
    failed_functions: set[tuple[int, int, str]] = field(default_factory=set)
    weights: dict[tuple[int, int], list[Value]] = field(default_factory=dict)
    """The weights that were submitted, by run and step."""
    pinned: set[int] = field(default_factory=set)
    tags: dict[str, int] = field(default_factory=dict)
    leased: set[int] = field(default_factory=set)
    commits: dict[int, list[int]] = field(default_factory=dict)
    """The steps that each run has committed, in their order."""
    gone_on: set[int] = field(default_factory=set)
    """The runs that had gone on after the backup from which the root was restored."""

    def is_lost(self, run: int, key: str) -> bool:
        """Whether the root knows nothing of a run, or no longer all of it: it was restored."""
        known = self.runs[run - 1].who if run <= len(self.runs) else ""
        return key.partition(".")[0] != known or run in self.gone_on

    def restore(self, backup: "Model") -> "Model":
        """Return the model of a root that is replaced by its backup."""
        made = deepcopy(backup)
        made.leased.clear()
        since = deepcopy(self.saves[len(backup.saves) :])
        made.saves += [each for each in since if each.run <= len(made.runs)]
        for each in made.saves:
            if each in since or not each.committed:
                each.committed, each.excuse = False, each.excuse or "the root was restored"
        of_known = {key: each for key, each in self.weights.items() if key[0] <= len(made.runs)}
        made.weights |= deepcopy(of_known)  # what waits in memory may still be committed
        for run, steps in self.commits.items():
            known = {*backup.steps, *backup.commits.get(run, ())}
            if run <= len(made.runs) and steps[-1] not in known:
                made.gone_on.add(run)
        return made

    def of(self, run: int, step: int, kind: str) -> list[Saved]:
        """The saves of a step: more than one if it was submitted again."""
        return [
            each for each in self.saves if (each.run, each.step, each.kind) == (run, step, kind)
        ]

    def newest_start(self) -> int:
        """Number of the newest run that is no rewind; 0 if there is none."""
        numbers = [at for at, run in enumerate(self.runs, 1) if not isinstance(run.who, tuple)]
        return max(numbers, default=0)

    # ------------------------------------------------------------ order

    def by_age(self) -> list[int]:
        """The committed steps by run, and by number within a run."""
        return sorted(self.steps, key=lambda step: (self.steps[step].run, step))

    def newest(self) -> dict[str, tuple[int, int]]:
        """Run and step of the newest commit of each kind."""
        ages = [(self.steps[step].run, step) for step in self.by_age()]
        return {kind: age for age in ages for kind in self.steps[age[1]].kinds}

    def newest_weights(self, role: str) -> tuple[int, int]:
        """Run and step of the newest commit with a role's model that counts."""
        ages = [
            (each.run, step)
            for step, each in self.steps.items()
            if any(key[:2] == (role, "model") for key in each.values)
        ]
        return max((age for age in ages if not self.superseded(*age)), default=(0, 0))

    def superseded(self, run: int, step: int) -> bool:
        """Whether a later run began before this step, or went back behind this run.

        A run that a later one went back behind no longer counts.
        """
        return self.superseded_by(len(self.runs), run, step)

    def counts(self, step: int) -> bool:
        """Whether no run that has committed such a step since has superseded a committed step."""
        there = self.steps[step]
        such = [
            ("checkpoint" in there.kinds and each.checkpoint_run) or each.run
            for each in self.steps.values()
            if there.kinds <= each.kinds
        ]
        return not self.superseded_by(max(such), there.run, step)

    def superseded_by(self, newest: int, run: int, step: int) -> bool:
        """Whether the runs up to the ``newest`` have superseded a step."""
        counting: list[Run] = []
        for number in range(newest, run, -1):
            later = self.runs[number - 1]
            if any(0 < each.back_to_run < number for each in counting):
                continue
            if not later.loaded or later.begins_at < step or 0 < later.back_to_run < run:
                return True
            counting.append(later)
        return False

    # ------------------------------------------------------------ commits

    def kinds_of(self, saved: Saved) -> set[str]:
        """A checkpoint has weights if it has a model; what functions write may be anything."""
        by_functions = (saved.run, saved.step, saved.kind) in self.functions
        has_model = any(component == "model" for _, component, _ in saved.values)
        return {saved.kind} | ({"state_dict"} if has_model or by_functions else set())

    def forget_failed_sync(self, saved: Saved, found: set[Key]) -> None:
        """Have a checkpoint be without the parts of its step's sync that are not ``found``.

        A sync that has failed before the checkpoint was submitted takes them with it.
        """
        syncs = self.of(saved.run, saved.step, "state_dict")
        if not all(each.committed for each in syncs):
            gone = saved.of_sync - found
            saved.values = {key: each for key, each in saved.values.items() if key not in gone}

    def outcomes(self, saved: Saved) -> list[Step]:
        """What may be committed at a step, once this save is."""
        there, kinds = self.steps.get(saved.step), self.kinds_of(saved)
        if there and there.run == saved.run:  # a sync and a checkpoint add up
            values = {**saved.values, **there.values}
            left = 0 if saved.kind == "checkpoint" else there.checkpoint_run
            return [Step(saved.run, kinds | there.kinds, values, {**there.files}, left)]
        replaced = Step(saved.run, kinds, saved.values)
        if there and there.kinds - kinds and saved.values.items() <= there.values.items():
            left = there.checkpoint_run or there.run
            left_in_place = Step(saved.run, there.kinds, there.values, {**there.files}, left)
            return [left_in_place, replaced]
        return [replaced]

    def reason_to_fail(self, run: int, step: int, kind: str, roles: tuple[str, ...]) -> str:
        """Why a save need not be committed; empty if it has to be."""
        there = self.steps.get(step)
        saves = [each for each in self.of(run, step, kind) if each.roles == roles]
        if self.superseded(run, step):
            return "superseded"
        if (run, step, kind) in self.failed_functions:
            return "its function has failed"
        if excuses := [each.excuse for each in saves if each.excuse]:
            return excuses[0]
        if any(each.values != saves[0].values for each in saves):
            return "it was submitted again, with another content"
        syncs = self.of(run, step, "state_dict")
        for key in {key for each in saves for key in each.of_sync}:
            if len({each.values[key] for each in syncs if key in each.values}) > 1:
                return "a sync that it shares parts with was, with another content"
        if not there and saves and all(each.committed for each in saves):
            return "another save had committed it, and the step was removed"
        if there and there.run > run:
            return "a later run has committed the step"
        if there and there.run < run and saves and there.kinds - self.kinds_of(saves[0]):
            return "it serves as less than what it would replace"
        return ""

    def see_what_is_committed(self, step: int) -> None:
        """Note the saves that are part of what is committed."""
        if there := self.steps.get(step):
            for each in self.saves:
                its = (each.run, each.step) == (there.run, step) and each.kind in there.kinds
                each.committed |= its and each.values.items() <= there.values.items()
            self.ever |= {(step, *each) for each in there.values.items()}

    # ------------------------------------------------------------ what stays

    @property
    def claimed(self) -> set[int]:
        """The steps that are pinned, tagged or leased."""
        return self.pinned | set(self.tags.values()) | self.leased

    def kept(self, *, last: int, last_syncs: int) -> set[int]:
        """The steps that stay, whatever is removed: the newest steps, and those that are needed."""
        counting = [step for step in self.by_age() if self.counts(step)]
        checkpoints = [step for step in counting if "checkpoint" in self.steps[step].kinds]
        syncs = [step for step in counting if "checkpoint" not in self.steps[step].kinds]
        stay = {*checkpoints[-last:], *syncs[-last_syncs:], *self.claimed}
        stay |= {step for _, step in self.newest().values()}
        for each in self.saves:  # a save of it is in flight
            if not (each.committed or each.excuse or self.superseded(each.run, each.step)):
                stay.add(each.step)
        own = [each for each in self.steps.values() if each.run == len(self.runs)]
        if self.runs[-1].loaded and not any("checkpoint" in each.kinds for each in own):
            stay.add(self.runs[-1].begins_at)
        return stay & set(self.steps)

    def earlier(self, run: int) -> set[int]:
        """The steps of earlier runs, if the run did not go on from any of them."""
        if self.runs[run - 1].loaded:
            return set()
        return {step for step, each in self.steps.items() if each.run < run}

    def newer(self, step: int) -> set[int]:
        """What a rewind to a step puts into quarantine."""
        run = self.steps[step].run
        return {each for each in self.steps if each > step or self.steps[each].run > run}

    def rewind(self, step: int) -> None:
        """Make a step the newest one again."""
        run, newer = self.steps[step].run, self.newer(step)
        if self.runs[-1].who != ("rewind", step, run):
            self.runs.append(Run(("rewind", step, run), step, loaded=True, back_to_run=run))
        self.steps = {each: self.steps[each] for each in self.steps if each not in newer}
        self.pinned -= newer
        self.tags = {name: each for name, each in self.tags.items() if each not in newer}
