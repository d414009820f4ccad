"""Retention policies: small values that map a list of steps to the steps to keep.

Policies read no files and no clock, so they can be tested on any history. They only add up: a step
is kept if any policy keeps it. Their short form, in settings, flow parameters and on the command
line, is a list of words: ``last=3,every=100,hourly=24,best=2:reward:max``.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from trinity_sync.errors import ConfigError
from trinity_sync.fs.file_system import CLOCKS_DIFFER_S
from trinity_sync.layout import Kind

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PERIODS = {"hourly": 3600, "daily": 86400, "weekly": 7 * 86400}


@dataclass(frozen=True)
class StepInfo:
    """The input of policies for a committed step."""

    step: int
    run: int
    kinds: tuple[Kind, ...]
    committed_at: float
    """Seconds since the epoch."""
    nbytes: int
    resume_nbytes: int = 0
    """Bytes that only a resume needs, which can be removed alone: there are weights beside them."""
    is_reduced: bool = False
    """Whether it has the weights of checkpoints alone: what retention has kept, or a merge."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Reasons to keep it whatever the policies say: pins, tags, leases, pointers."""
    corruption: str = ""
    """Reason why its files are corrupted; such a step is neither counted nor removed."""
    nonfinite: str = ""
    """Which values of it are NaN or infinite, as far as they were looked at; empty if healthy."""
    superseded_by: int = 0
    """Number of the run that superseded the step; 0 if none did."""
    forgotten_at: float | None = None
    """When that run began, in seconds since the epoch, if it is of another training, so that a user
    may have forgotten to load this step; otherwise null."""
    checkpoint_run: int = 0
    """Earlier run whose checkpoint it still has; 0 if that is ``run``'s."""

    @property
    def age(self) -> tuple[bool, int, int]:
        """Sort key: superseded steps first; then, as a resume chooses, by run and by step."""
        return not self.superseded_by, self.run, self.step


Term = Callable[[Sequence[StepInfo], float], dict[int, str]]
"""Returns the steps that a word of a policy keeps, each with the reason; arguments as those of
`Policy.keeps`."""


@dataclass(frozen=True)
class Policy:
    """A rule that keeps the steps that any of its words keeps; ``str`` returns its short form."""

    words: tuple[str, ...]
    terms: tuple[Term, ...] = field(compare=False)
    """What each word keeps."""
    goes_by_time: bool = field(default=False, compare=False)
    """Whether clocks decide what it keeps."""

    def keeps(self, steps: Sequence[StepInfo], now: float | str) -> dict[int, str]:
        """Return the steps to keep, each with the reasons.

        ``steps`` are valid, of one type (checkpoints, or syncs), oldest first. ``now`` is in
        seconds since the epoch, or the reason why no age is known: a policy that goes by time then
        keeps all. Such a policy also keeps what was committed later than that, and counts without.

        Raises:
            ConfigError: no step has the metric that a word names.
        """
        if isinstance(now, str):
            if self.goes_by_time:
                return {each.step: now for each in steps}
            now = 0.0
        kept, every = dict[int, str](), steps
        if self.goes_by_time:
            late = [each for each in steps if each.committed_at > now + CLOCKS_DIFFER_S]
            kept = {each.step: "committed in the future" for each in late}
            steps = [each for each in steps if each.step not in kept]
        for term in self.terms:
            try:
                found = term(steps, now)
            except ConfigError:  # late steps may be the only ones that have the metric
                found = term(every, now)
            for step, why in found.items():
                kept[step] = f"{kept[step]}; {why}" if step in kept else why
        return kept

    def __str__(self) -> str:
        return ",".join(self.words)


def _keep_all(steps: Sequence[StepInfo], now: float) -> dict[int, str]:
    return {each.step: "all are kept" for each in steps}


def _keep_last(count: int, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
    return {each.step: f"one of the last {count}" for each in _drop_superseded(steps)[-count:]}


def _keep_every(interval: int, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
    chosen = (each for each in steps if each.step % interval == 0)
    return {each.step: f"a multiple of {interval}" for each in chosen}


def _keep_one_per(period: str, count: int, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
    """Keep the first step of each period, for the last ``count`` periods that have a step.

    The result does not depend on what else is removed, so prune can run at any time.
    """
    first: dict[int, StepInfo] = {}
    for each in sorted(_drop_superseded(steps), key=lambda each: each.committed_at):
        first.setdefault(int(each.committed_at // PERIODS[period]), each)
    chosen = list(first.values())[-count:]
    return {each.step: f"one of the last {count} {period}" for each in chosen}


def _keep_newer(seconds: float, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
    chosen = (each for each in steps if each.committed_at > now - seconds)
    return {each.step: f"newer than {format_duration(seconds)}" for each in chosen}


def _keep_best(
    count: int, metric: str, mode: str, steps: Sequence[StepInfo], now: float
) -> dict[int, str]:
    """Keep the steps with the best values of a metric, and the newer steps without a value.

    An evaluation takes time, so steps newer than the last value are kept until they have one. NaN
    and infinities are never among the best.
    """
    steps = _drop_superseded(steps)
    rated = [each for each in steps if metric in each.metrics]
    if not rated and steps:
        known = ", ".join(sorted({name for each in steps for name in each.metrics}))
        raise ConfigError(
            f"policy best={count}:{metric}:{mode}: no step has the metric {metric!r} (known: "
            f"{known or 'none'}). Record it with coordinator.record_metrics, or correct the "
            "policy; nothing was removed."
        )
    numbers = [each for each in rated if math.isfinite(each.metrics[metric])]
    sign = -1 if mode == "max" else 1
    best = sorted(numbers, key=lambda each: sign * each.metrics[metric])[:count]
    kept = {
        each.step: f"one of the best {count}, {metric} {each.metrics[metric]:g}" for each in best
    }
    for each in steps:
        if each.age > rated[-1].age:
            kept[each.step] = f"waits for its {metric}"
    return kept


def _drop_superseded(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps that count where a number of steps is kept."""
    return [each for each in steps if not each.superseded_by]


ALL = Policy(("all",), (_keep_all,))
"""The policy that keeps every step."""
_COUNT = "([0-9]*[1-9][0-9]*)"
_AGE = r"\d+(?:\.\d+)?[smhd]"
_WORDS: tuple[tuple[str, bool, Callable[..., Term]], ...] = (
    ("all", False, lambda: _keep_all),
    (f"last={_COUNT}", False, lambda count: partial(_keep_last, int(count))),
    (f"every={_COUNT}", False, lambda interval: partial(_keep_every, int(interval))),
    (f"({'|'.join(PERIODS)})={_COUNT}", True, lambda word, n: partial(_keep_one_per, word, int(n))),
    (f"newer=({_AGE})", True, lambda age: partial(_keep_newer, parse_duration(age) or 0.0)),
    (
        f"best={_COUNT}:([^:=]+):(min|max)",
        False,
        lambda count, metric, mode: partial(_keep_best, int(count), metric, mode),
    ),
)
"""The form of each word, whether clocks decide what it keeps, and what makes its term."""

WITHOUT_METRICS = {"keep_quarantine": "folders in quarantine", "remote_keep": "remotes"}
"""What the policies of these settings apply to."""


def parse_policy(text: str) -> Policy:
    """Return the policy of a short form, e.g. ``last=3,every=100,hourly=24,best=2:reward:max``.

    ``all`` keeps everything; a bare number means ``last``.

    Raises:
        ConfigError: a word or value is unknown; the message lists the known ones.
    """
    words = [word.strip() for word in text.split(",")]
    words = [f"last={word}" if word.isdecimal() else word for word in words]
    found = [_parse_word(word, text) for word in words]
    if "all" in words:
        return ALL
    go_by_time, terms = zip(*found, strict=True)
    return Policy(tuple(words), terms, any(go_by_time))


def refuse_metrics(setting: str, policy: str) -> None:
    """Require that the policy of a setting in `WITHOUT_METRICS` goes by no metric.

    Raises:
        ConfigError: it does.
    """
    if "best=" in policy:
        raise ConfigError(f"{setting}={policy}: {WITHOUT_METRICS[setting]} have no metrics")


def _parse_word(word: str, text: str) -> tuple[bool, Term]:
    for pattern, goes_by_time, make in _WORDS:
        if found := re.fullmatch(pattern, word):
            return goes_by_time, make(*found.groups())
    raise ConfigError(
        f"retention policy {text!r}: {word!r} is unknown. Words are all, last=3, every=100, "
        "hourly=24, daily=7, weekly=4, newer=2d (s, m, h, d) and best=2:reward:max (or min), with "
        "commas between them."
    )


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``2m`` or ``30d``; None if it is none."""
    return float(text[:-1]) * UNITS[text[-1]] if re.fullmatch(_AGE, text) else None


def format_duration(seconds: float) -> str:
    """Return seconds in the form of `parse_duration`, in the largest unit that they fill."""
    for unit in ("d", "h", "m"):
        if seconds >= UNITS[unit] and seconds % UNITS[unit] == 0:
            return f"{seconds / UNITS[unit]:.15g}{unit}"
    return f"{seconds:.15g}s"
