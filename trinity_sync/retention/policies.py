"""Retention policies: small values that map a list of steps to the steps to keep.

Policies read no files and no clock, so they can be tested on any history. They only add up: a step
is kept if any policy keeps it. Their short form, in settings, flow parameters and on the command
line, is a list of words: ``last=3,every=100,hourly=24,best=2:reward:max``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trinity_sync.errors import ConfigError
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Reasons to keep it whatever the policies say: pins, tags, leases, pointers."""
    corruption: str = ""
    """Reason why its files are corrupted; such a step is neither counted nor removed."""
    superseded_by: int = 0
    """Number of the run that began at step 0 although the step existed; 0 if no run superseded the
    step."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key of `storage.discovery.find_newest`: by run, then by step."""
        return self.run, self.step


class Policy(Protocol):
    """A rule that keeps steps; ``str`` returns its short form."""

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """Return the steps to keep, each with the reason.

        ``steps`` are valid, of one type (checkpoints, or syncs), oldest first. ``now`` is in
        seconds since the epoch.
        """


@dataclass(frozen=True)
class All:
    """Keep every step."""

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        return {each.step: "all are kept" for each in steps}

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True)
class LastN:
    """Keep the last ``count`` steps."""

    count: int

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        return {each.step: f"one of the last {self.count}" for each in steps[-self.count :]}

    def __str__(self) -> str:
        return f"last={self.count}"


@dataclass(frozen=True)
class EveryN:
    """Keep the steps whose number is a multiple of ``interval``."""

    interval: int

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        chosen = (each for each in steps if each.step % self.interval == 0)
        return {each.step: f"a multiple of {self.interval}" for each in chosen}

    def __str__(self) -> str:
        return f"every={self.interval}"


@dataclass(frozen=True)
class OnePer:
    """Keep the first step of each period, for the last ``count`` periods that have a step.

    The result does not depend on what else is removed, so prune can run at any time.
    """

    seconds: float
    count: int
    word: str

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        first: dict[int, StepInfo] = {}
        for each in sorted(steps, key=lambda each: each.committed_at):
            first.setdefault(int(each.committed_at // self.seconds), each)
        chosen = list(first.values())[-self.count :]
        return {each.step: f"one of the last {self.count} {self.word}" for each in chosen}

    def __str__(self) -> str:
        return f"{self.word}={self.count}"


@dataclass(frozen=True)
class NewerThan:
    """Keep the steps that were committed within ``seconds``."""

    seconds: float

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        chosen = (each for each in steps if each.committed_at > now - self.seconds)
        return {each.step: f"newer than {format_duration(self.seconds)}" for each in chosen}

    def __str__(self) -> str:
        return f"newer={format_duration(self.seconds)}"


@dataclass(frozen=True)
class BestK:
    """Keep the steps with the best values of a metric, and the newer steps without a value.

    An evaluation takes time, so steps newer than the last value are kept until they have one. NaN
    is the worst value.
    """

    count: int
    metric: str
    mode: Literal["min", "max"]

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`.

        Raises:
            ConfigError: no step has the metric.
        """
        rated = [each for each in steps if self.metric in each.metrics]
        if not rated and steps:
            known = ", ".join(sorted({name for each in steps for name in each.metrics}))
            raise ConfigError(
                f"policy {self}: no step has the metric {self.metric!r} (known: "
                f"{known or 'none'}). Record it with coordinator.record_metrics, or correct the "
                "policy; nothing was removed."
            )
        numbers = [each for each in rated if not math.isnan(each.metrics[self.metric])]
        sign = -1 if self.mode == "max" else 1
        best = sorted(numbers, key=lambda each: sign * each.metrics[self.metric])[: self.count]
        kept = {
            each.step: f"one of the best {self.count}, {self.metric} {each.metrics[self.metric]:g}"
            for each in best
        }
        for each in steps:
            if each.age > rated[-1].age:
                kept[each.step] = f"waits for its {self.metric}"
        return kept

    def __str__(self) -> str:
        return f"best={self.count}:{self.metric}:{self.mode}"


@dataclass(frozen=True)
class AnyOf:
    """Keep the steps that any of the policies keeps."""

    policies: tuple[Policy, ...]

    def keeps(self, steps: Sequence[StepInfo], now: float) -> dict[int, str]:
        """As `Policy.keeps`."""
        kept: dict[int, str] = {}
        for policy in self.policies:
            for step, why in policy.keeps(steps, now).items():
                kept[step] = f"{kept[step]}; {why}" if step in kept else why
        return kept

    def __str__(self) -> str:
        return ",".join(map(str, self.policies))


def parse_policy(text: str) -> Policy:
    """Return the policy of a short form, e.g. ``last=3,every=100,hourly=24,best=2:reward:max``.

    ``all`` keeps everything; a bare number means ``last``.

    Raises:
        ConfigError: a word or value is unknown; the message lists the known ones.
    """
    policies = tuple(_parse_word(word.strip(), text) for word in text.split(","))
    if any(isinstance(policy, All) for policy in policies):
        return All()
    return policies[0] if len(policies) == 1 else AnyOf(policies)


def _parse_word(word: str, text: str) -> Policy:
    name, _, value = word.partition("=") if "=" in word or word == "all" else ("last", "", word)
    if name == "all" and not value:
        return All()
    if name == "last":
        return LastN(_count(value, word, text))
    if name == "every":
        return EveryN(_count(value, word, text))
    if name in PERIODS:
        return OnePer(PERIODS[name], _count(value, word, text), name)
    if name == "newer" and (seconds := parse_duration(value)) is not None:
        return NewerThan(seconds)
    if name == "best" and (best := re.fullmatch(r"(\d+):([^:=]+):(min|max)", value)):
        return BestK(_count(best[1], word, text), best[2], "max" if best[3] == "max" else "min")
    raise _unknown(word, text)


def _count(value: str, word: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]*[1-9][0-9]*", value):
        raise _unknown(word, text)
    return int(value)


def _unknown(word: str, text: str) -> ConfigError:
    return ConfigError(
        f"retention policy {text!r}: {word!r} is unknown. Words are all, last=3, every=100, "
        "hourly=24, daily=7, weekly=4, newer=2d (s, m, h, d) and best=2:reward:max (or min), with "
        "commas between them."
    )


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``2m`` or ``30d``; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    return float(found[1]) * UNITS[found[2]] if found else None


def format_duration(seconds: float) -> str:
    """Return seconds in the form of `parse_duration`, in the largest unit that they fill."""
    for unit in ("d", "h", "m"):
        if seconds >= UNITS[unit] and seconds % UNITS[unit] == 0:
            return f"{seconds / UNITS[unit]:.15g}{unit}"
    return f"{seconds:.15g}s"
