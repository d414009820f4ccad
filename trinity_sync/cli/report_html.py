"""Render the report of a job with the template ``report.html.j2``."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinity_sync.cli.output import format_size, format_time

if TYPE_CHECKING:
    from trinity_sync.orchestration.report import JobReport


@dataclass(frozen=True)
class Dot:
    """A committed step in the timeline; its area shows its size."""

    step: int
    kind: str
    style: str
    nbytes: int
    committed_at: float
    x: float
    y: int
    radius: float


@dataclass(frozen=True)
class Timeline:
    """A chart of the committed steps over time, with a lane for each run."""

    width: int
    height: int
    left: int
    """Where the lanes begin, right of their labels."""
    start: float
    """Time of the first commit, in seconds since the epoch."""
    end: float
    lanes: dict[int, int]
    """Vertical position of each run."""
    dots: list[Dot]


@dataclass(frozen=True)
class Use:
    """A pin, lease or reader that uses a step."""

    step: object
    kind: str
    name: str
    since: float
    """Seconds since the epoch; 0 if it is unknown."""


def render_report(report: JobReport) -> str:
    """Return the report of a job as one HTML page that loads nothing else."""
    environment = Environment(
        loader=PackageLoader("trinity_sync", "cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=format_size, time=_format_time)
    return environment.get_template("report.html.j2").render(
        report=report,
        figures=summarize(report),
        timeline=lay_out_timeline(report),
        uses=list_uses(report),
    )


def summarize(report: JobReport) -> dict[str, str]:
    """Return the key figures of a job by their captions."""
    manifests = [step.manifest for step in report.steps if step.manifest and step.is_loadable]
    newest = max(((each.run, each.step) for each in manifests), default=None)
    last = max((each.committed_at for each in manifests), default=None)
    nbytes = sum(step.manifest.nbytes for step in report.steps if step.manifest)
    saves = [run.seconds for run in report.runs if run.is_save and not run.failed]
    return {
        "newest step": str(newest[1]) if newest else "none",
        "committed steps": str(sum(step.is_loadable for step in report.steps)),
        "on disk": format_size(nbytes),
        "last commit": _format_time(last) if last else "never",
        "median flow run": f"{median_high(saves):.2f} s" if saves else "unknown",
        "failed runs": "unknown" if report.server_error else str(len(report.failed_runs)),
    }


def lay_out_timeline(report: JobReport) -> Timeline | None:
    """Place each committed step at its time in the lane of its run; None if there is none."""
    committed = [(step, step.manifest) for step in report.steps if step.manifest]
    if not committed:
        return None
    times = [manifest.committed_at for _, manifest in committed]
    start, end = min(times), max(times)
    largest = max(manifest.nbytes for _, manifest in committed) or 1
    width, left, lane, margin = 1000, 70, 44, 20
    runs = sorted({manifest.run for _, manifest in committed})
    lanes = {run: lane * index + lane // 2 for index, run in enumerate(runs)}
    dots = []
    for step, manifest in committed:
        kind = "checkpoint" if "checkpoint" in manifest.kinds else "state_dict"
        elapsed = (manifest.committed_at - start) / max(end - start, 1.0)
        dots.append(
            Dot(
                step=step.step,
                kind=kind,
                style=kind if step.is_loadable else "corrupted",
                nbytes=manifest.nbytes,
                committed_at=manifest.committed_at,
                x=left + margin + (width - left - 2 * margin) * elapsed,
                y=lanes[manifest.run],
                radius=3 + 12 * (manifest.nbytes / largest) ** 0.5,
            )
        )
    return Timeline(width, lane * len(runs) + 30, left, start, end, lanes, dots)


def list_uses(report: JobReport) -> list[Use]:
    """Return the pins, leases and readers that use a step."""
    pins = [Use(pin.step, pin.kind, pin.why, pin.pinned_at) for pin in report.pins]
    leases = [
        Use(lease.step, "lease", f"{lease.holder} on {lease.host.partition('/')[0]}", 0.0)
        for lease in report.leases
    ]
    readers = [
        Use(serving.get("step", ""), "serves", name, _read_time(serving.get("since")))
        for name, serving in sorted(report.readers.items())
    ]
    return [*pins, *leases, *readers]


def _read_time(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0.0


def _format_time(seconds: float) -> str:
    return format_time(seconds).replace("T", " ")
