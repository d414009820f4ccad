"""A job's report as one HTML page: no script, no font, no picture that would have to be loaded."""

from collections.abc import Container, Iterable
from html import escape
from typing import TYPE_CHECKING

from trinity_sync.cli.app import format_size, format_time

if TYPE_CHECKING:
    from trinity_sync.orchestration.prefect_queries import RunFacts
    from trinity_sync.orchestration.report import JobFacts, StepFacts

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #66707c; --line: #d9dee4;
  --good: #2f6fde; --sync: #8fb3ee; --bad: #c93636; --paper: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #98a2ae; --line: #333a43; --paper: #15181c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem }
p { color: var(--dim); margin: .2rem 0 }
a { color: var(--good) }
.figures { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0 }
.figures b { display: block; font-size: 1.6rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th { text-align: left; font-weight: 600; color: var(--dim) }
th, td { padding: .3rem .8rem .3rem 0; vertical-align: top; border-bottom: 1px solid var(--line) }
td.n { font-variant-numeric: tabular-nums }
.bad { color: var(--bad) }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--dim); font-size: 11px }
.checkpoint { fill: var(--good) }
.state_dict { fill: var(--sync) }
.corrupted { fill: var(--bad) }
.axis { stroke: var(--line) }
"""


def render(job: "JobFacts") -> str:
    """The whole page."""
    failed = [run for run in job.runs if run.failed]
    body = [
        f"<h1>{escape(job.root)}</h1>",
        f"<p>job {escape(job.job)}, seen {escape(_time(job.made_at))}</p>",
        _figures(job, failed),
        "<h2>Timeline</h2>",
        _timeline(job.steps),
        "<h2>Steps</h2>",
        _steps(job),
        "<h2>Failures</h2>",
        _failures(job, failed),
        "<h2>Who needs which step</h2>",
        _claims(job),
        "<h2>Retention</h2>",
        _retention(job),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{escape(job.job)}: checkpoints</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figures(job: "JobFacts", failed: "list[RunFacts]") -> str:
    loadable = [step for step in job.steps if step.state in ("valid", "superseded")]
    newest = max(((s.manifest.run, s.step) for s in loadable if s.manifest), default=None)
    last = max((s.manifest.committed_at for s in loadable if s.manifest), default=None)
    nbytes = sum(step.manifest.nbytes for step in job.steps if step.manifest)
    saves = [run.seconds for run in job.runs if not run.failed and "kind" in run.tags]
    median = f"{sorted(saves)[len(saves) // 2]:.2f} s" if saves else "unknown"
    figures = {
        "newest step": str(newest[1]) if newest else "none",
        "committed steps": str(len(loadable)),
        "on disk": format_size(nbytes),
        "last commit": _time(last) if last else "never",
        "median flow run": median,
        "failed runs": str(len(failed)) if not job.no_server else "unknown",
    }
    cells = (f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in figures.items())
    return f"<div class='figures'>{''.join(cells)}</div>"


def _timeline(steps: "list[StepFacts]") -> str:
    """Each commit at its time, in the lane of its run; the area tells its size."""
    known = [(step, step.manifest) for step in steps if step.manifest]
    if not known:
        return "<p>nothing is committed</p>"
    times = [manifest.committed_at for _, manifest in known]
    start, span = min(times), max(max(times) - min(times), 1.0)
    runs = sorted({manifest.run for _, manifest in known})
    largest = max(manifest.nbytes for _, manifest in known) or 1
    width, lane, left = 1000, 44, 70
    height = lane * len(runs) + 30
    shapes = []
    for number, run in enumerate(runs):
        y = lane * number + lane // 2
        shapes.append(f"<line class='axis' x1='{left}' x2='{width}' y1='{y}' y2='{y}'/>")
        shapes.append(f"<text x='0' y='{y + 4}'>run {run}</text>")
    for step, manifest in known:
        x = left + 20 + (width - left - 40) * (manifest.committed_at - start) / span
        y = lane * runs.index(manifest.run) + lane // 2
        radius = 3 + 12 * (manifest.nbytes / largest) ** 0.5
        kind = "checkpoint" if "checkpoint" in manifest.kinds else "state_dict"
        name = kind if step.state in ("valid", "superseded") else "corrupted"
        size, committed = format_size(manifest.nbytes), _time(manifest.committed_at)
        title = f"step {step.step}, {kind}, {size}, {committed}"
        shapes.append(
            f"<circle class='{name}' data-step='{step.step}' cx='{x:.1f}' cy='{y}' "
            f"r='{radius:.1f}'><title>{escape(title)}</title></circle>"
        )
    ends = (
        f"<text x='{left}' y='{height - 6}'>{escape(_time(start))}</text>"
        f"<text x='{width}' y='{height - 6}' text-anchor='end'>{escape(_time(max(times)))}</text>"
    )
    return (
        f"<svg role='img' aria-label='commits over time' viewBox='0 0 {width} {height}'>"
        f"{''.join(shapes)}{ends}</svg>"
    )


def _steps(job: "JobFacts") -> str:
    timed: dict[tuple[str | None, str | None], list[RunFacts]] = {}
    for run in job.runs:
        if "kind" in run.tags and not run.failed:
            timed.setdefault((run.tags.get("step"), run.tags.get("run")), []).append(run)
    rows = []
    for step in reversed(job.steps):
        manifest = step.manifest
        runs = timed.get((str(step.step), str(manifest.run)), []) if manifest else []
        seconds = "; ".join(
            f"{run.seconds:.2f} s ({_tasks(run)})" if run.tasks else f"{run.seconds:.2f} s"
            for run in runs
        )
        receipts = manifest.receipts if manifest else ()
        parts = ", ".join(
            f"{name} {format_size(nbytes)}" for name, nbytes in step.by_component.items()
        )
        rows.append(
            (
                str(step.step),
                str(manifest.run) if manifest else "",
                ", ".join(manifest.kinds) if manifest else "",
                format_size(manifest.nbytes) if manifest else "",
                parts,
                _time(manifest.committed_at) if manifest else "",
                seconds,
                "; ".join(f"{r.name} of rank {r.rank} {r.seconds:.2f} s" for r in receipts),
                step.state + (f", latest {', '.join(step.pointers)}" if step.pointers else ""),
            )
        )
    heads = ("step", "run", "kinds", "size", "parts", "committed", "flow run", "functions", "state")
    names = escape(", ".join(job.quarantined))
    quarantined = f"<p>in quarantine: {names}</p>" if names else ""
    note = f"<p>no durations: {escape(job.no_server)}</p>" if job.no_server else ""
    return _table("steps", heads, rows, numbers={0, 1, 3}) + quarantined + note


def _tasks(run: "RunFacts") -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in run.tasks.items())


def _failures(job: "JobFacts", failed: "list[RunFacts]") -> str:
    if job.no_server:
        return f"<p>unknown: {escape(job.no_server)}</p>"
    rows = [
        (run.name, run.state, _time(run.began) if run.began else "", run.message, run.url)
        for run in failed
    ]
    return _table("failures", ("flow run", "state", "began", "why", "page"), rows)


def _claims(job: "JobFacts") -> str:
    rows = [
        *((str(p.step), p.kind, p.why, _time(p.pinned_at)) for p in job.pins),
        *(
            (str(x.step), "lease", f"{x.holder} on {x.host.partition('/')[0]}", "")
            for x in job.leases
        ),
        *(
            (str(serving.get("step", "")), "serves", name, _since(serving.get("since")))
            for name, serving in sorted(job.readers.items())
        ),
    ]
    return _table("claims", ("step", "what", "who or why", "since"), rows, numbers={0})


def _retention(job: "JobFacts") -> str:
    names = ("step", "run", "kinds", "bytes", "state", "why")
    rows = [tuple(str(row.get(name, "")) for name in names) for row in job.retention]
    return _table("retention", names, rows, numbers={0, 1, 3})


def _table(
    name: str,
    heads: Iterable[str],
    rows: Iterable[tuple[str, ...]],
    numbers: Container[int] = (),
) -> str:
    lines = []
    for row in rows:
        cells = (
            f"<td{' class=n' if number in numbers else ''}>{_cell(value)}</td>"
            for number, value in enumerate(row)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if not lines:
        return f"<p id='{name}'>none</p>"
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return (
        f"<div class='scroll'><table id='{name}'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(value: str) -> str:
    if value.startswith(("http://", "https://")):
        return f"<a href='{escape(value)}'>open</a>"
    bad = value.startswith(("corrupted", "not committed", "Failed", "Crashed"))
    return f"<span class=bad>{escape(value)}</span>" if bad else escape(value)


def _time(seconds: float) -> str:
    return format_time(seconds).replace("T", " ")


def _since(value: object) -> str:
    return _time(value) if isinstance(value, (int, float)) else ""
