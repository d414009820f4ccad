"""Steps of a root as input of policies, and the reasons to keep a step whatever they say.

Pins, tags, leases, pointers, pending exports, saves in flight and a required remote keep a step.
"""

from functools import partial
from pathlib import Path

from trinity_sync.errors import CommitError, ManifestError, SpoolError, SupersededError
from trinity_sync.layout import KINDS, step_folder
from trinity_sync.retention.planner import RemovalPlan, make_step_info
from trinity_sync.retention.policies import StepInfo
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    read_manifest_state,
    require_committed,
)
from trinity_sync.storage.export_requests import list_steps_awaiting_export
from trinity_sync.storage.job_settings import needs_replication
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import read_manifest, read_run_number
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_steps_in_use
from trinity_sync.storage.runs import (
    build_lineage,
    find_newest_run,
    list_runs,
    refuse_superseded,
)
from trinity_sync.storage.save import is_being_written
from trinity_sync.storage.save_functions import read_statuses

IN_FLIGHT_S = 3600.0
"""Maximum age in seconds of a temporary file that shows a save in flight."""
NOT_REPLICATED = "the required remote does not have it yet"
SAVING = "a save of it is in flight"
LINKED = "its folder is a symbolic link; remove it by hand"


def list_step_infos(root: str | Path) -> list[StepInfo]:
    """Return all steps with a readable manifest, oldest first; prune removes no others.

    Raises:
        FormatError: another release has made the root or begun a run.
    """
    read_identity(root)  # which refuses a root of another release
    held = _list_held(root)
    lineage = build_lineage(list_runs(root), partial(read_run_number, root))
    found = []
    for manifest in iter_committed_steps(root):
        corruption = read_manifest_state(root, manifest, runs=()).reason
        if not corruption and needs_replication(root, manifest):
            held[manifest.step].append(NOT_REPLICATED)
        if step_folder(root, manifest.step).is_symlink():
            held[manifest.step].append(LINKED)
        found.append(
            make_step_info(
                manifest,
                metrics=read_metrics(root, manifest.run, manifest.step),
                held=held[manifest.step],
                corruption=corruption,
                superseded_by=lineage.supersedes(manifest.run),
            )
        )
    return sorted(found, key=lambda each: each.age)


def _list_held(root: str | Path) -> dict[int, list[str]]:
    """Return the steps that must be kept whatever the policies say, with reasons."""
    held = list_steps_in_use(root)
    for step, roles in list_steps_awaiting_export(root).items():
        held[step].append(f"the export of the model of {', '.join(roles)} is pending")
    for kind in KINDS:
        if (pointed := read_latest_pointer(root, kind)) is not None:
            held[pointed].append(f"the latest pointer of {kind}s names it")
    run = find_newest_run(root)
    pointed = read_latest_pointer(root, "checkpoint")
    latest = 0 if pointed is None else read_run_number(root, pointed)
    if run and run.resumed_from and latest < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def find_reason_to_keep(
    root: Path, planned: StepInfo, plan: RemovalPlan, spool: JobSpool | None
) -> str | None:
    """Return why a planned step must be kept; None if it may be removed, empty if it is gone.

    Images in ``spool``, the job's on this node, may need the files of the step.

    Raises:
        FormatError: another release has committed the step, begun a run or made ``spool``.
    """
    try:
        manifest = read_manifest(root, planned.step)
    except ManifestError as error:
        return str(error)
    if manifest is None:
        return ""
    planned_commit = (planned.run, planned.kinds, planned.committed_at)
    if (manifest.run, manifest.kinds, manifest.committed_at) != planned_commit:
        return "it was committed again meanwhile"
    if held := _list_held(root)[planned.step]:
        return "; ".join(held)
    if needs_replication(root, manifest):
        return NOT_REPLICATED
    if step_folder(root, planned.step).is_symlink():
        return LINKED
    if saving := _find_save_in_flight(root, planned, spool):
        return saving
    for kind in manifest.kinds:
        successor = plan.newest[kind]
        try:
            found = require_committed(root, successor.step)
        except CommitError as error:
            return f"the newer step {successor.step} is not valid: {error}"
        if (found.run, found.step) <= planned.age or kind not in found.kinds:
            return f"step {successor.step} is no longer newer"
    return None


def _find_save_in_flight(root: Path, planned: StepInfo, spool: JobSpool | None) -> str:
    """Return which other save of the step, by any run, may need its files; empty if none.

    A ticket that cannot be read keeps the step that it names. Without a step, it keeps nothing.

    Raises:
        FormatError: another release has begun a run or made ``spool``.
    """
    if is_being_written(root, planned.step, within_s=IN_FLIGHT_S):
        return SAVING
    if spool is None:
        return ""
    sealed, unreadable = spool.tickets()
    for ticket in (image.ticket for image in sealed):
        if ticket.step == planned.step and not _is_superseded(
            root, ticket.run, ticket.run_key, ticket.step
        ):
            return SAVING
    for error in unreadable:
        superseded = error.run is not None and _is_superseded(root, error.run, "", planned.step)
        if error.step == planned.step and not superseded:
            return f"the spool may have an image of it: {error}"
    newest = find_newest_run(root)
    runs = {planned.run, newest.number if newest else planned.run}
    try:
        for run in runs:
            for kind in KINDS:
                statuses = read_statuses(spool, run, planned.step, kind)
                if any(status.state != "failed" for status in statuses):
                    return SAVING
    except SpoolError as error:
        return str(error)
    return ""


def _is_superseded(root: Path, run: int, run_key: str, step: int) -> bool:
    """Return whether a later run has superseded the step of an image."""
    try:
        refuse_superseded(root, run, run_key, step)
    except SupersededError:
        return True
    return False
