"""``make bench``: all cases, a table, and ``benchmarks/results/latest.json``.

``QUICK=1`` takes smaller states and fewer runs. ``BENCH_ROOT`` names a folder on the disk to
measure; the current folder by default.
"""

import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Record, machine, write
from benchmarks.orchestration import orchestration
from benchmarks.stall import durable, stall
from trinity_sync.settings import Settings

LIMITS = {"stall": "warm memcpy", "durable": "raw direct-I/O write"}


def main() -> None:
    """Measure, print, write."""
    quick = bool(os.environ.get("QUICK"))
    cases = [(1 << 28, 300)] if quick else [(1 << 28, 300), (1 << 30, 300), (1 << 30, 3000)]
    runs = 3 if quick else 7
    console = Console()
    records: list[Record] = []
    home = os.environ.get("BENCH_ROOT", ".")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        root = Path(folder).resolve()
        for nbytes, tensors in cases:
            console.print(f"{nbytes >> 20} MiB in {tensors} tensors ...")
            job = root / f"{nbytes}-{tensors}"
            job.mkdir()
            records += stall(job, nbytes, tensors, runs)
            records += durable(job, nbytes, tensors, runs)
        console.print("orchestration ...")
        with tempfile.TemporaryDirectory(prefix="trinity_sync-bench-", dir="/dev/shm") as shared:
            settings = Settings(home=root / "home", spool=Path(shared) / "spool")
            records += orchestration(root, settings, runs)
    show(console, records)
    write(Path(__file__).parent / "results" / "latest.json", records)


def show(console: Console, records: list[Record]) -> None:
    """The records as a table, each beside the limit of its case."""
    table = Table(title=f"medians; {machine()}")
    for column in ("case", "state", "system", "metric", "median", "min", "max", "to the limit"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right")
    limits = {
        (r.case, r.bytes, r.tensors): r.median for r in records if r.system == LIMITS.get(r.case)
    }
    for r in records:
        limit = limits.get((r.case, r.bytes, r.tensors))
        table.add_row(
            r.case,
            f"{r.bytes >> 20} MiB / {r.tensors}" if r.bytes else "",
            r.system,
            r.metric,
            *(f"{1e3 * value:,.0f} ms" for value in (r.median, r.min, r.max)),
            f"{r.median / limit:.2f} x" if limit else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
