"""The JSON documents of the commands, and what their keys mean where no dataclass says it.

A document is ``{"schema": 1, "<noun>": ...}``, with a list of rows or a single object below the
noun. Its keys are the fields of a dataclass, by the names of `output.KEYS`.
"""

from typing import Any

from trinity_sync.cli.rows import (
    DeploymentRow,
    ForgottenJob,
    JobRow,
    MetricRow,
    PruneReport,
    SettingRow,
    StepDetails,
    StoppedStack,
    UiReport,
    Unpinned,
)
from trinity_sync.formats.dcp import DcpResult
from trinity_sync.formats.hf_export import ExportResult
from trinity_sync.orchestration.report.facts import JobReport, SaveRow, StepRow
from trinity_sync.remote.upload import Replicated
from trinity_sync.stack.doctor_job import Check
from trinity_sync.stack.local_stack import StackStatus
from trinity_sync.storage.gc import Finding
from trinity_sync.storage.rewind import RewindResult
from trinity_sync.storage.steps_in_use import Pin
from trinity_sync.storage.verify import VerifiedStep
from trinity_sync.weights.state_files import SyncReport

MEANINGS = {
    "bytes": "Size of all files.",
    "committed_at": "Time of the commit.",
    "components": "Components that it has.",
    "files": "Number of files, or their paths.",
    "folder": "Its folder.",
    "flow_run": "Id of the flow run.",
    "in_use": "Pins, tags and leases of the step, in words.",
    "kind": "``checkpoint``, or ``state_dict`` for weights alone.",
    "kinds": "``checkpoint``, ``state_dict``, or both.",
    "metrics": "Recorded metrics.",
    "name": "Its name.",
    "nodes": "Number of nodes, or their names.",
    "number": "Number of the run.",
    "rank": "Rank.",
    "ranks": "Number of ranks.",
    "reason": "Why it is not valid, or was not done.",
    "role": "Role of the state.",
    "roles": "Roles that it saved.",
    "root": "Root of the job.",
    "run": "Number of the run that saved it.",
    "run_key": "Key of that run.",
    "seconds": "Time that it took.",
    "status": "Status, in a word.",
    "step": "Number of the step.",
    "tags": "Tags of the step.",
    "tensors": "Number of tensors.",
    "timing": "How long it took.",
    "what": "What was found.",
    "url": "Page of the flow run in the Prefect UI.",
}
"""Meaning of the keys that a dataclass does not describe."""

DOCUMENTS: dict[str, tuple[str, Any]] = {
    "ls": ("steps", list[StepRow]),
    "show": ("step", StepDetails),
    "runs": ("saves", list[SaveRow]),
    "retry": ("save", SaveRow),
    "wait": ("steps", list[StepRow]),
    "readers": ("readers", SyncReport | None),
    "jobs ls": ("jobs", list[JobRow]),
    "jobs set": ("settings", list[SettingRow]),
    "jobs forget": ("job", ForgottenJob),
    "prune": ("prune", PruneReport),
    "rm": ("prune", PruneReport),
    "metrics": ("metrics", list[MetricRow]),
    "pin": ("pin", Pin),
    "unpin": ("pin", Unpinned),
    "report": ("report", JobReport),
    "rewind": ("rewind", RewindResult),
    "verify": ("steps", list[VerifiedStep]),
    "reconcile": ("findings", list[Finding]),
    "remote push": ("push", Replicated),
    "remote pull": ("step", StepRow),
    "merge": ("step", StepRow),
    "export hf": ("export", ExportResult),
    "export dcp": ("export", DcpResult),
    "up": ("stack", StackStatus),
    "restart": ("stack", StackStatus),
    "join": ("stack", StackStatus),
    "status": ("stack", StackStatus),
    "down": ("stack", StoppedStack),
    "doctor": ("checks", list[Check]),
    "deploy": ("deployments", list[DeploymentRow]),
    "ui": ("ui", UiReport),
    "config show": ("settings", list[SettingRow]),
}
"""Noun and content of the JSON document of each command that has ``-o``."""
