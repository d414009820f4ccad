"""``python -m benchmarks.dcp``: DCP's ``async_save`` on trinity_sync, DCP's own, its successor's.

Two gloo ranks share the state of an FSDP2 training. All systems save the same live state in turns,
are durable, and are loaded back and compared by a digest of all bytes; see `benchmarks.cases`. The
peers have the configuration that their authors recommend for a CPU; see their modules in
`benchmarks.systems`. ``QUICK=1`` takes a small state only.
"""

import os
from collections.abc import Iterator

from benchmarks.plan import make_case
from benchmarks.run import Run, measure
from benchmarks.targets import PLUG_INS
from benchmarks.training import Size

PROCESS, THREAD = "DCP async, process", "DCP async, thread"
SUCCESSOR = "torch-checkpointing"
TURNS = 7


def full(run: Run) -> Iterator[str]:
    """Measure 1 GiB and 4 GB; of the larger, only two systems at a time fit into 24 GiB."""
    middle, large = Size(1 << 30, 300, ranks=2), Size(4 * 10**9, 300, ranks=2)
    with run.stack():
        for case, held in (
            (make_case(middle, (PLUG_INS, PROCESS, THREAD, SUCCESSOR), TURNS, what="DCP"), 5),
            (make_case(large, (PLUG_INS, PROCESS), TURNS, what="DCP process"), 3),
            (make_case(large, (PLUG_INS, SUCCESSOR), TURNS, what="DCP successor"), 3),
        ):
            yield case.name
            run.case(case, held)


def quick(run: Run) -> Iterator[str]:
    """Measure all systems on a small state."""
    systems = (PLUG_INS, PROCESS, THREAD, SUCCESSOR)
    case = make_case(Size(1 << 27, 300, ranks=2), systems, 3, what="DCP")
    with run.stack():
        yield case.name
        run.case(case, held=5)


if __name__ == "__main__":
    measure("dcp-quick", quick) if os.environ.get("QUICK") else measure("dcp", full)
