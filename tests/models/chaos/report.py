"""What a campaign tells, as a page of Markdown."""

import os
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from tests.models.chaos.invariants import Fates


@dataclass
class Report:
    seed: int
    minutes: float
    driver: str = "stack"
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds from a fault's end to the commit of a step that was submitted after it."""
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    starts: int = 0
    commits: int = 0
    by_saver: int = 0
    """All commits of the saver, also those that retention removed between two looks."""
    fates: Fates | None = None
    versions_read: int = 0

    def __str__(self) -> str:
        every = [seconds for kind in self.recoveries.values() for seconds in kind]
        lines = [
            f"driver {self.driver}, seed {self.seed}, {self.minutes:.1f} minutes on "
            f"{os.cpu_count()} cores (load {os.getloadavg()[1]:.0f}): {len(every)} faults, "
            f"{self.starts} starts of the training, {self.commits} commits seen, "
            f"{self.by_saver} made by the saver, {self.versions_read} versions read",
            "",
            "| fault | survived | back after (median, max) |",
            "|---|---|---|",
        ]
        for kind, seconds in sorted(self.recoveries.items()):
            back = f"{median(seconds):.1f} s, {max(seconds):.1f} s"
            lines.append(f"| {kind} | {len(seconds)} | {back} |")
        if every:
            lines.append(f"| all | {len(every)} | {median(every):.1f} s, {max(every):.1f} s |")
        if self.fates:
            lines += [
                "",
                *(f"- failed: {each}" for each in self.fates.told),
                *(f"- LOST: {each}" for each in self.fates.lost),
            ]
        if self.skipped:
            lines += ["", f"Not possible here: {', '.join(self.skipped)}."]
        lines += ["", *(f"PROBLEM: {each}" for each in self.problems)]
        if self.fates:
            lines.append(
                f"Of the saves that all ranks had submitted, {self.fates.committed} were "
                f"committed, {self.fates.refused} superseded by a resume, {len(self.fates.told)} "
                f"failed and said so, {len(self.fates.lost)} lost; {len(self.problems)} problems."
            )
        return "\n".join(lines).rstrip() + "\n"
