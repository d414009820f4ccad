"""What the Prefect UI shows on the page of a save: how it went, or what failed and what to do.

Markdown is made here, from plain values; the tasks create the artifacts. Digests and the full list
of files are in the manifest.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trinity_sync.errors import EvictedError, SupersededError
from trinity_sync.orchestration.quantities import format_bytes, format_duration, format_rate
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.save_timing import SaveTiming, Stall
from trinity_sync.storage.uncommitted import Written

StepOutcome = Literal["committed", "unhealthy", "failed", "evicted", "superseded", "corrupted"]

MOST_ROWS = 100
"""Rows of a table, and nodes in a list: the server keeps every page, and people read a screen."""


@dataclass(frozen=True)
class FailedTask:
    """A task of a save that failed."""

    node: str
    what: str
    """Component, or what else the task does."""
    reason: str
    path: str = ""
    """File that could not be written; empty if the error names none."""


@dataclass(frozen=True)
class SaveFailure:
    """Why a save failed, and what is safe."""

    outcome: StepOutcome
    reason: str
    tasks: Sequence[FailedTask] = ()
    last_committed: int | None = None
    """Newest committed step of the kind; None if there is none."""
    remaining: Mapping[str, int] = field(default_factory=dict)
    """Images of the save that are still in memory, by node."""

    @property
    def can_be_retried(self) -> bool:
        """Whether a retry of the flow run can still commit the save."""
        return self.outcome == "failed" and any(self.remaining.values())


def get_outcome(error: Exception) -> StepOutcome:
    """Return how a save ended that raised an error."""
    if isinstance(error, SupersededError):
        return "superseded"
    return "evicted" if isinstance(error, EvictedError) else "failed"


def describe_commit(request: SaveRequest, manifest: Manifest, written: Sequence[Written]) -> str:
    """Return the page of a committed save, as markdown; ``written`` are the files of all nodes."""
    timing = manifest.timings[0]
    rows = {
        "Job": f"`{request.job}` in `{request.root}`, run {request.run}",
        "Trainer stall": _describe_stalls(timing.stalls),
        "Submitted to committed": f"**{format_duration(timing.total_s)}** = queue "
        f"{timing.queue_s:.2f} + write {timing.write_s:.2f} + commit {timing.commit_s:.2f} s",
        "Written": _describe_written(timing, written),
        "Values": _describe_values(manifest),
    }
    root = shlex.quote(request.root)
    commands = [f"trinity-sync show {root} {request.step}", f"trinity-sync report {root}"]
    own = [file for file in written if file.temporary]
    return "\n\n".join(
        [
            f"### {request.flow_run_name}: committed",
            _make_properties(rows),
            "Next: " + " · ".join(f"`{command}`" for command in commands),
            "#### By component and node",
            _make_table(("component", "node", "files", "bytes", "speed"), _sum_up(own)),
        ]
    )


def summarize_commit(request: SaveRequest, manifest: Manifest) -> str:
    """Return the line about a committed save on the card of its artifact."""
    timing = manifest.timings[0]
    stall = timing.longest_stall
    held = f", trainer stall {format_duration(stall.seconds)}" if stall else ""
    alarms = "".join(f"; {alarm}" for alarm in manifest.alarms)
    return (
        f"{request.flow_run_name}: committed in {format_duration(timing.total_s)}{held}, "
        f"{format_bytes(timing.nbytes)}{alarms}"
    )


def summarize_failure(request: SaveRequest, failure: SaveFailure) -> str:
    """Return the line about a failed save on the card of its artifact."""
    retry = f"trinity-sync retry {shlex.quote(request.root)} {request.step}"
    what = f". Its images are in memory: `{retry}`" if failure.can_be_retried else ""
    return f"{request.flow_run_name}: {failure.outcome}{what}"


def describe_failure(request: SaveRequest, failure: SaveFailure) -> str:
    """Return the page of a save that was not committed, as markdown."""
    images = sum(failure.remaining.values())
    places = [f"{count} on `{node}`" for node, count in failure.remaining.items() if count]
    where = ", ".join(places[:MOST_ROWS])
    if len(places) > MOST_ROWS:
        where += f", and on {len(places) - MOST_ROWS:,} more nodes"
    if images:
        memory = f"{_count(images, 'image')} still in memory ({where}), until later saves need room"
    else:
        memory = "its images are no longer in memory"
    last = failure.last_committed
    safe = f"step {last} is the newest committed one" if last is not None else "nothing yet"
    root = shlex.quote(request.root)
    rows = {
        "Job": f"`{request.job}` in `{request.root}`, run {request.run}",
        "Safe": f"{safe}; later saves are unaffected",
        "This step": memory,
    }
    parts = [
        f"### {request.flow_run_name}: {failure.outcome}",
        "\n".join(f"> {line}" for line in failure.reason.strip().splitlines()),
        _make_properties(rows),
    ]
    if failure.tasks:
        rows_of_tasks = [
            (
                f"`{each.node}`",
                each.what,
                f"`{each.path}`" if each.path else "",
                "as above" if each.reason == failure.reason else each.reason,
            )
            for each in failure.tasks[:MOST_ROWS]
        ]
        if (more := len(failure.tasks) - MOST_ROWS) > 0:
            nodes = {each.node for each in failure.tasks[MOST_ROWS:]}
            rows_of_tasks.append(
                (f"and {more:,} more", "", "", f"on {_count(len(nodes), 'node')}: see the logs")
            )
        parts += [
            "#### What failed",
            _make_table(("node", "component", "file", "reason"), rows_of_tasks),
        ]
    parts.append("#### What to do")
    if failure.outcome == "superseded":
        parts.append(
            "Nothing: a later run of the job went on from an earlier step, and saves that step "
            f"itself. `trinity-sync ls {root}` lists the steps."
        )
    elif not failure.can_be_retried:
        parts.append(
            "The step cannot be saved any more. See why saves are slow or were not taken: "
            f"`trinity-sync status` and `trinity-sync report {root}`."
        )
    else:
        parts.append(
            "Remove the cause, then press Retry on the page of the flow run, or type:\n\n"
            f"```\ntrinity-sync retry {root} {request.step}\n```"
        )
    return "\n\n".join(parts)


def _describe_stalls(stalls: Sequence[Stall]) -> str:
    if not stalls:
        return "unknown: only save functions wrote files"
    if len(stalls) == 1:
        return f"**{format_duration(stalls[0].seconds)}** (slowest rank: {stalls[0].rank})"
    return ", ".join(
        f"{each.role} **{format_duration(each.seconds)}** (slowest rank: {each.rank})"
        for each in stalls
    )


def _describe_values(manifest: Manifest) -> str:
    norms = [
        f"{each.role}/{each.component} {each.norm:.4g}" for each in manifest.health if each.tensors
    ]
    alarms = "".join(f"; **{alarm}**" for alarm in manifest.alarms)
    return f"norm {', '.join(norms) or 'unknown'}{alarms}"


def _describe_written(timing: SaveTiming, written: Sequence[Written]) -> str:
    own = [file for file in written if file.temporary]
    if not own:
        return "nothing new"
    files, ranks = _count(len(own), "file"), _count(timing.ranks, "rank")
    text = f"{format_bytes(timing.nbytes)}, {files}, {ranks} on {_count(timing.nodes, 'node')}"
    if rate := format_rate(timing.nbytes, timing.write_s):
        slow = max(own, key=lambda file: file.seconds)
        text += (
            f", {rate} (slowest: {slow.record.component} of rank {slow.record.rank} on "
            f"`{slow.node}`, {format_duration(slow.seconds)})"
        )
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _sum_up(written: Sequence[Written]) -> list[tuple[object, ...]]:
    """Return rows of component, node, files, bytes and speed; of many nodes, one row for all."""
    nodes = {file.node for file in written}
    everyone = f"{len(nodes):,} nodes" if len(nodes) > MOST_ROWS else ""
    groups: dict[tuple[str, str], list[Written]] = {}
    for file in written:
        where = everyone or f"`{file.node}`"
        groups.setdefault((file.record.component, where), []).append(file)
    rows: list[tuple[object, ...]] = []
    for (component, node), files in sorted(groups.items()):
        nbytes = sum(file.record.nbytes for file in files)
        # the files of a group are written side by side
        longest = max(file.seconds for file in files)
        # that of a small file means nothing
        speed = format_rate(nbytes, longest) if nbytes >= 1_000_000 else ""
        rows.append((component, node, f"{len(files):,}", format_bytes(nbytes), speed))
    return rows


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def _make_properties(rows: Mapping[str, str]) -> str:
    """Return a table of two columns, whose first row is the header that markdown requires."""
    first, *others = rows.items()
    return _make_table(first, others)


def _escape(cell: object) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")


def make_failed_task(node: str, what: str, error: BaseException) -> FailedTask:
    """Return what a task's error says."""
    rank, path = getattr(error, "rank", -1), getattr(error, "path", None)
    where = f"{what} of rank {rank}" if rank >= 0 else what
    return FailedTask(node, where, str(error), str(path or ""))
