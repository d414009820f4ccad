"""``make bench``: all cases, tables, ``benchmarks/results/full.json`` and a plot for the README.

``QUICK=1`` takes one small case and the main peers (``quick.json``). ``BENCH_ROOT`` names a folder
on the disk to measure; the current folder by default. It fails if any system loads other bits than
it saved.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # helper processes import this module, too; it must be light
    from benchmarks.cases import Case
    from benchmarks.measure import Record, Samples
    from benchmarks.training import Size

RESULTS = Path(__file__).parent / "results"
WORKING_MEMORY = 3 << 30
"""Bytes that a case takes at most in addition to the state and the systems' copies of it."""


@dataclass
class Run:
    """One run of the bench: the folders that it writes to, and its results so far."""

    root: Path
    shared: Path
    environment: dict[str, str] = field(default_factory=dict)
    records: "list[Record]" = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def on_ranks(self, ranks: int, program: str, *arguments: Any) -> Any:
        """Run a program on ranks, in new folders."""
        with self.folders() as folders:
            return self.on_ranks_in(folders, ranks, program, *arguments)

    def on_ranks_in(
        self, folders: tuple[Path, Path], ranks: int, program: str, *arguments: Any
    ) -> Any:
        """As `on_ranks`, in folders that several programs share."""
        from benchmarks.ranks import on_ranks

        return on_ranks(
            ranks,
            program,
            *arguments,
            *folders,
            environment=self.environment,
            log=self.root / "ranks.log",
        )

    @contextmanager
    def folders(self) -> Iterator[tuple[Path, Path]]:
        """Yield an empty folder on the disk that is measured, and one in shared memory."""
        folder = Path(tempfile.mkdtemp(dir=self.root))
        shared = Path(tempfile.mkdtemp(dir=self.shared))
        try:
            yield folder, shared
        finally:
            for path in folder, shared:  # a saver may write there until it sees that they are gone
                shutil.rmtree(path, ignore_errors=True)

    def case(self, case: "Case", held: int) -> None:
        """Measure a case whose systems hold ``held`` bytes for each byte of the state, at most.

        On a machine with too little memory the case is left out, which the report says.
        """
        from benchmarks.measure import records_of
        from benchmarks.resources import available_bytes

        need = int((1.4 + held) * case.size.nbytes) + WORKING_MEMORY
        if available_bytes() < need:
            self.absent[case.name] = f"left out: needs {need >> 30} GiB of free memory"
            return
        samples, absent = self.on_ranks(case.size.ranks, "benchmarks.cases:measure", case)
        self.absent.update(absent)
        # loading is measured by `restores`; here it was the proof
        proofs = [key for key in samples if key[1].startswith("restore")]
        others = {key: values for key, values in samples.items() if key not in proofs}
        self.records += records_of(case.name, case.size, others)

    def restores(self, case: "Case") -> None:
        """Measure loading, each time in a process that has neither saved nor loaded before."""
        from benchmarks.cases import shuffled
        from benchmarks.measure import joined, records_of

        size, ranks = case.size, case.size.ranks
        parts: list[Samples] = []
        with ExitStack() as kept:
            loads: list[tuple[tuple[Path, Path], str, tuple[Any, ...]]] = []
            for name in case.systems:
                folders = kept.enter_context(self.folders())
                program = "benchmarks.restore:saved"
                digests, in_memory = self.on_ranks_in(folders, ranks, program, size, name)
                for from_memory in (False, True) if in_memory else (False,):
                    how = (size, name, from_memory, digests)
                    loads.append((folders, "benchmarks.restore:restored", how))
            loads.append((kept.enter_context(self.folders()), "benchmarks.restore:limits", (size,)))
            for turn in range(case.turns):
                for folders, program, how in shuffled(loads, turn):
                    parts.append(self.on_ranks_in(folders, ranks, program, *how))
        self.records += records_of(case.name, size, joined(*parts))

    def fixed_cost(self, size: "Size", runs: int) -> None:
        """Measure what staging costs before the first byte is copied."""
        from benchmarks.measure import records_of

        samples = self.on_ranks(1, "benchmarks.layout:fixed_cost", size, runs)
        self.records += records_of(f"layout, {size.tensors} tensors", size, samples)

    def small_tensors(self, tensors: int, runs: int) -> None:
        """Measure the stall of a save of tensors of 4 KiB."""
        from benchmarks.measure import records_of
        from benchmarks.training import Size

        samples = self.on_ranks(1, "benchmarks.layout:small_tensors", tensors, runs)
        size = Size(tensors << 12, tensors)
        self.records += records_of(f"{tensors:,} tensors of 4 KiB", size, samples)

    def first(self, case: "Case") -> None:
        """Measure the first save of a process, each time in a new one."""
        from benchmarks.cases import shuffled
        from benchmarks.measure import joined, records_of

        parts: list[Samples] = []
        for turn in range(case.turns):
            for name in shuffled(case.systems, turn):
                program = "benchmarks.cases:first_save"
                parts.append(self.on_ranks(case.size.ranks, program, case.size, name))
        self.records += records_of(case.name, case.size, joined(*parts))

    def memory(self, case: "Case") -> None:
        """Measure the memory of a case's systems, one after the other."""
        from benchmarks.measure import records_of

        samples: Samples = {}
        for name in case.systems:
            program = "benchmarks.memory:peak_memory_a_byte"
            found = self.on_ranks(case.size.ranks, program, case.size, name)
            if found is not None:
                samples[name, "memory a byte"] = [found]
        self.records += records_of(case.name, case.size, samples)

    def orchestration(self, runs: int) -> None:
        """Measure what Prefect and Ray add to a save of next to no bytes."""
        from benchmarks.measure import records_of
        from benchmarks.training import Size

        samples = self.on_ranks(1, "benchmarks.orchestration:orchestration", runs)
        self.records += records_of("orchestration", Size(0, 3), samples)

    def small_saves(self, system: str, runs: int) -> None:
        """Measure what saves of next to no bytes cost, and what the system costs at rest."""
        from benchmarks.measure import records_of
        from benchmarks.targets import SMALL_SAVES
        from benchmarks.training import Size

        samples = self.on_ranks(1, "benchmarks.small_saves:small_saves", system, runs)
        self.records += records_of(SMALL_SAVES, Size(0, 3), samples)

    def shared_over_intervals(self, size: "Size") -> None:
        """Measure the shared memory that a training holds, by the interval between its saves."""
        from benchmarks.measure import records_of

        samples = self.on_ranks(1, "benchmarks.memory:shared_over_intervals", size)
        self.records += records_of("shared memory over intervals", size, samples)

    @contextmanager
    def stack(self) -> Iterator[None]:
        """Run a local stack within the block."""
        from trinity_sync.settings import Settings
        from trinity_sync.stack import local_stack

        settings = Settings(home=self.root / "home", spool=self.shared / "spool")
        try:
            self.environment = {
                **local_stack.up(settings).environment,
                "TRINITY_SYNC_HOME": str(settings.home),
                "TRINITY_SYNC_SPOOL": str(settings.spool),
            }
            yield
        finally:
            local_stack.down(settings)
        self.environment = {}


def measure(name: str, plan: "Callable[[Run], Iterator[str]]") -> "list[Record]":
    """Measure the cases of a plan, print them, write ``benchmarks/results/<name>.json``."""
    from benchmarks.measure import write
    from benchmarks.report import show

    home = os.environ.get("BENCH_ROOT", ".")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or nothing would be cleaned up
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=home, ignore_cleanup_errors=True) as root,
        tempfile.TemporaryDirectory(
            prefix="trinity_sync-bench-", dir="/dev/shm", ignore_cleanup_errors=True
        ) as shared,
    ):
        run = Run(Path(root).resolve(), Path(shared))
        try:
            start = time.monotonic()
            for case in plan(run):
                print(f"{time.monotonic() - start:4.0f} s: {case} ...", flush=True)
        finally:  # what was measured before an interruption is shown, and not kept
            show(run.records, run.absent)
        print(f"{time.monotonic() - start:4.0f} s in all")
        write(RESULTS / f"{name}.json", run.records, run.absent)
    return run.records


def main() -> None:
    """Measure all cases, or those of ``QUICK=1``, and draw the first."""
    from benchmarks.plan import full, quick
    from benchmarks.report import plot

    name = "quick" if os.environ.get("QUICK") else "full"
    records = measure(name, quick if name == "quick" else full)
    plot(records, records[0].case, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
