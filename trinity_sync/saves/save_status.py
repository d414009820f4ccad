"""What has become of a save: one table for what waits for saves and for what lists them.

It reads nothing. The manifest tells what is committed, the journal who works on a save and how that
ended, the node's memory what waits.
"""

from dataclasses import dataclass
from typing import Literal

from trinity_sync.saves.journal import Entry

SaveStatus = Literal[
    "submitted", "begun", "left", "committed", "done",
    "removed", "not exported", "not replicated", "superseded", "failed",
]  # fmt: skip
SUCCESSES: tuple[SaveStatus, ...] = "done", "removed"
FAILURES: tuple[SaveStatus, ...] = "not exported", "not replicated", "superseded", "failed"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a save at one look."""

    told: Entry | None = None
    """What the journal or its flow run tells of its last attempt."""
    is_committed: bool = False
    """Whether its run has committed it, with what this process has submitted."""
    counts: bool = True
    """Whether the latest pointers cover it, and a required remote has it."""
    is_exported: bool = True
    """Whether the models that it requests are part of the step."""
    marked: str | None = None
    """Why its images in memory are marked as failed; None if they are not."""
    is_gone: bool = False
    """Whether its step was removed or replaced after the commit."""
    is_superseded: bool = False
    """Whether a later run goes on from an earlier step."""


def decide(facts: Facts) -> tuple[SaveStatus, str]:
    """Return the status of a save, and why it is not done, if anything tells that."""
    told = facts.told
    is_counted = facts.is_committed and facts.counts
    if is_counted and facts.is_exported:
        return "done", ""
    if told and told.state == "completed" and facts.is_gone:
        return "removed", ""
    if told and told.has_ended:
        missed: SaveStatus = "failed"
        if facts.is_committed:
            missed = "not exported" if is_counted else "not replicated"
        elif facts.is_superseded:
            missed = "superseded"
        return missed, told.message if told.has_failed else facts.marked or ""
    if facts.is_committed:
        return "committed", ""
    if facts.marked is not None:
        return "superseded" if facts.is_superseded else "failed", facts.marked
    if told:
        return "left" if told.is_left else "begun", told.message
    return "submitted", ""
