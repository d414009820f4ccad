"""Tables and drawings that are made from the code and the recorded benchmarks at build time."""

import html
import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RECORDS = REPOSITORY / "benchmarks/results/full.json"
POLICIES = ("last=3", "every=50", "hourly=3", "best=2:reward:max")


def costs() -> str:
    """Compare the stall and the time to durable of the systems, from the recorded run."""
    from benchmarks.targets import GIB, ORCHESTRATED, RECYCLED, WITH_PREFECT, medians_of

    found = medians_of(RECORDS)
    rows = [
        ("**trinity_sync**", GIB, RECYCLED),
        ("**trinity_sync**, with the stack", WITH_PREFECT, ORCHESTRATED),
        ("DCP `async_save`, thread", GIB, "DCP async, thread"),
        ("DCP `async_save`, process", GIB, "DCP async, process"),
        ("torch-checkpointing", GIB, "torch-checkpointing"),
        ("`torch.save`", GIB, "torch.save"),
        ("veRL's manager", GIB, "veRL"),
        ("for comparison: a memory copy, a raw write", GIB, ""),
    ]
    lines = ["| | trainer stalls for | on disk after |", "|---|---|---|"]
    for name, case, system in rows:
        stall = found[case, system or "warm memcpy", "stall"]
        durable = found[case, system or "raw write", "durable"]
        lines.append(f"| {name} | {stall:.2f} s | {durable:.2f} s |")
    return "\n".join(lines)


def drivers() -> str:
    """Compare the two drivers of a save, from the recorded run."""
    from benchmarks.targets import (
        FLOW,
        GIB,
        ORCHESTRATED,
        OURS,
        RECYCLED,
        SMALL_SAVES,
        WITH_PREFECT,
        medians_of,
    )

    found = medians_of(RECORDS)
    rows = [
        ("Prefect", WITH_PREFECT, FLOW, ORCHESTRATED),
        ("the saver, next to an idle stack", WITH_PREFECT, OURS, RECYCLED),
        ("the saver, without a stack", GIB, OURS, RECYCLED),
        ("for comparison: a raw write there", GIB, "raw write", "raw write, existing file"),
    ]
    lines = ["| 1 GiB is on disk after | new files | files of a removed step |", "|---|---|---|"]
    for name, case, fresh, recycled in rows:
        seconds = (found[case, system, "durable"] for system in (fresh, recycled))
        lines.append(f"| {name} | {' | '.join(f'{each:.2f} s' for each in seconds)} |")
    cpu, at_rest, mb, committed = (
        found[SMALL_SAVES, OURS, metric]
        for metric in ("cpu a save", "cores at rest", "RSS", "committed")
    )
    return "\n".join(lines) + (
        f"\n\nA save of almost no bytes costs the saver {cpu:.2f} CPU seconds and is committed "
        f"{committed:.2f} s after the call. At rest it takes {at_rest:.3f} of a core, and "
        f"{mb:.0f} MB."
    )


def targets() -> str:
    """List the targets of the project with what the recorded run measured."""
    from benchmarks.targets import table

    return table()


def vllm() -> str:
    """Compare the ways of updating a vLLM engine, a table for each recorded model."""
    from benchmarks.measure import Record
    from benchmarks.vllm_table import COLUMNS, rows_of

    body = json.loads((RECORDS.parent / "vllm.json").read_text())
    records = [Record(**record) for record in body["records"]]
    lines = [f"{body['machine']}, {body['date']}."]
    for case in dict.fromkeys(record.case for record in records):
        own = [record for record in records if record.case == case]
        size = f"{own[0].bytes / 1e6:,.1f} MB in {own[0].tensors} tensors"
        lines += ["", f"**{case}**, {size}:", ""]
        lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS))]
        lines += [f"| {' | '.join(row)} |" for row in rows_of(own)]
    return "\n".join(lines)


def swimlane() -> str:
    """Draw one save on a time axis, from the recorded run."""
    from benchmarks.targets import ORCHESTRATED, WITH_PREFECT, medians_of

    found = medians_of(RECORDS)
    stall = found[WITH_PREFECT, ORCHESTRATED, "stall"]
    durable = found[WITH_PREFECT, ORCHESTRATED, "durable"]
    begin = stall + found["orchestration", "trinity_sync + Prefect", "first task"]
    lanes = [
        ("training thread", [(0, stall, "stall", "stop"), (stall, 1.0, "training", "go")]),
        ("saver", [(stall, stall + 0.02, "request", "work")]),
        ("server, worker", [(stall + 0.02, begin, "start of the run", "work")]),
        ("Ray tasks", [(begin, durable - 0.04, "write, digest, sync", "work")]),
        ("commit task", [(durable - 0.04, durable, "commit", "work")]),
        ("readers, resume", [(durable, 1.0, "see the step", "go")]),
    ]
    left, width, height = 130, 640, 30
    parts = []
    for row, (name, bars) in enumerate(lanes):
        y = 30 + row * height
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        for start, end, label, kind in bars:
            x, wide = left + start * width, max((end - start) * width, 3)
            parts.append(
                f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{wide:.0f}" height="22"/>'
            )
            if wide > 7 * len(label):
                parts.append(
                    f'<text x="{x + wide / 2:.0f}" y="{y + 15}" text-anchor="middle">{label}</text>'
                )
            else:
                parts.append(f'<text x="{x + wide + 6:.0f}" y="{y + 15}">{label}</text>')
    bottom = 30 + len(lanes) * height
    for at, label in ((stall, "sealed: survives the trainer"), (durable, "committed")):
        x = left + at * width
        parts.append(f'<line x1="{x:.0f}" y1="20" x2="{x:.0f}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{x:.0f}" y="14" text-anchor="middle">{label}: {1000 * at:.0f} ms</text>'
        )
    return _svg("One save over time", left + width + 60, bottom + 6, parts)


def slots() -> str:
    """Draw two slots over time, of saves that come faster than they are written."""
    free, parts, left, scale = [0.0, 0.0], [], 90, 34
    for number in range(1, 6):
        called = 3.0 * (number - 1)
        slot = free.index(min(free))
        start = max(called, free[slot])
        free[slot] = start + 7
        y = 12 + 44 * slot
        if start > called:
            x, wide = left + called * scale, (start - called) * scale
            parts.append(f'<rect class="stop" x="{x:.0f}" y="96" width="{wide:.0f}" height="20"/>')
        x, step = left + start * scale, 10 * number
        parts.append(f'<rect class="go" x="{x:.0f}" y="{y}" width="{scale}" height="30"/>')
        parts.append(
            f'<rect class="work" x="{x + scale:.0f}" y="{y}" width="{6 * scale - 3}" height="30"/>'
            f'<text x="{x + 4 * scale:.0f}" y="{y + 20}" text-anchor="middle">write {step}</text>'
            f'<text x="{x + scale / 2:.0f}" y="{y + 20}" text-anchor="middle">{step}</text>'
        )
    for y, name in ((32, "slot 1"), (76, "slot 2"), (110, "training")):
        parts.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{name}</text>')
    caption = (
        "A save every 3 s that takes 7 s to write: from the third on, saves wait for a slot (red)."
    )
    return _svg(caption, int(left + max(free) * scale), 124, parts) + f"\n\n{caption}"


def retention() -> str:
    """Draw what some policies keep of thirty steps, by the planner's own policies."""
    from trinity_sync.retention.policies import StepInfo, parse_policy

    steps = [
        StepInfo(
            step=10 * number,
            run=1,
            kinds=("checkpoint",),
            committed_at=600.0 * number,
            nbytes=1,
            metrics={"reward": round(1 - abs(number - 17) / 30, 3)},
        )
        for number in range(1, 31)
    ]
    now = steps[-1].committed_at
    rows = [(each, parse_policy(each).keeps(steps, now)) for each in POLICIES]
    rows.append(("all of them", parse_policy(",".join(POLICIES)).keeps(steps, now)))
    left, pitch, height = 150, 18, 26
    parts = []
    for row, (name, kept) in enumerate(rows):
        y = 20 + row * height
        parts.append(
            f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>'
        )
        for number, each in enumerate(steps):
            x, kind = left + number * pitch, "go" if each.step in kept else "none"
            title = f"<title>{each.step}: {html.escape(kept.get(each.step, 'removed'))}</title>"
            parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="6">{title}</circle>')
    bottom = 20 + len(rows) * height
    for number in range(4, 30, 5):
        x = left + number * pitch
        parts.append(
            f'<text x="{x}" y="{bottom + 4}" text-anchor="middle">{steps[number].step}</text>'
        )
    caption = "Thirty steps, one every ten minutes; the reward is best at step 170."
    return _svg(caption, left + 30 * pitch, bottom + 12, parts) + f"\n\n{caption}"


def _svg(title: str, width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg class="figure" role="img" aria-label="{html.escape(title)}" '
        f'viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )
