"""Which cases are measured, in which order, and who takes part in each.

A ratio holds within a case only: its systems took turns with each other and with the limits.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.systems import SYSTEMS
from benchmarks.training import Size

if TYPE_CHECKING:
    from benchmarks.run import Run

OURS = "trinity_sync"
MAIN = (OURS, "torch.save", "DCP async, process", "torch-checkpointing")
EVERYBODY = tuple(SYSTEMS)
LARGE = (
    (OURS, "torch.save"),
    (OURS, "DCP async, process"),
    (OURS, "torch-checkpointing"),
)
"""Groups for the largest state: more at a time do not fit into the memory."""


def quick(run: "Run") -> Iterator[str]:
    """One small state and the main peers; says what comes next."""
    case = Case(_name(Size(1 << 28, 300)), Size(1 << 28, 300), MAIN, turns=3, window=4, loads=1)
    yield case.name
    run.case(case, held=4.0)


def full(run: "Run") -> Iterator[str]:
    """Everything; says what comes next."""
    one = Size(1 << 30, 300)
    case = Case(_name(one), one, EVERYBODY, turns=7, window=3, loads=3)
    with run.stack():
        yield case.name
        run.case(case, held=6.0)
        yield "orchestration"
        run.orchestration(7)
    yield f"memory, {case.name}"
    run.memory(case)
    for size in (Size(1 << 28, 300), Size(1 << 30, 3000), Size(1 << 30, 300, ranks=2)):
        case = Case(_name(size), size, EVERYBODY, turns=7, loads=1)
        yield case.name
        run.case(case, held=6.0)
    large = Size(4 << 30, 300)
    for number, group in enumerate(LARGE, 1):
        case = Case(f"{_name(large)}, group {number}", large, group, turns=3, loads=1)
        yield case.name
        run.case(case, held=3.0)


def _name(size: Size) -> str:
    ranks = "1 rank" if size.ranks == 1 else f"{size.ranks} ranks"
    return f"{size.nbytes / 2**30:g} GiB, {size.tensors} tensors, {ranks}"
