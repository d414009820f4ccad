"""Which cases are measured, in which order, and who takes part in each.

A ratio holds within a case only: its systems took turns with each other and with the limits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.systems import SYSTEMS
from benchmarks.training import Size

if TYPE_CHECKING:
    from benchmarks.run import Run

TURNS = 7
LONG = 5
"""Turns of what takes long and differs little from one to the next."""
PEERS = ("torch.save", "DCP async, process", "torch-checkpointing")
MAIN = ("trinity_sync", *PEERS)
WITH_VARIANTS = ("trinity_sync, overlapped", "trinity_sync, recycled files", *MAIN, "veRL")
EVERYBODY = tuple(SYSTEMS)
IN_TRAINING = ("trinity_sync, overlapped", "DCP async, process", "torch-checkpointing")
LARGE = ("DCP async, process", "torch.save", "trinity_sync + Prefect, recycled files")
"""For the largest state: more at a time do not fit into 24 GiB."""
MANY = ("trinity_sync", "torch.save", "DCP async, process")
"""For many tensors, which cost some peers seconds a save."""


def quick(run: "Run") -> Iterator[str]:
    """One small state and the main peers; says what comes next."""
    small = _case(Size(1 << 28, 300), MAIN, turns=3, window=4)
    yield small.name
    run.case(small, held=4)


def full(run: "Run") -> Iterator[str]:
    """Everything; says what comes next."""
    middle = _case(Size(1 << 30, 300), EVERYBODY)
    large = _case(Size(4 * 10**9, 300), LARGE, turns=LONG)
    with run.stack():
        yield middle.name
        run.case(middle, held=11)
        yield large.name
        run.case(large, held=3)
        yield "orchestration"
        run.orchestration(TURNS)
    yield "layout"
    run.fixed_cost(Size(1 << 28, 3000), TURNS)
    yield "memory"
    holding = ("trinity_sync", "trinity_sync, recycled files", "DCP async, process")
    run.memory(_case(Size(1 << 28, 300), (*holding, "torch-checkpointing")))
    yield f"restore, {middle.name}"
    restoring = ("trinity_sync", "veRL", "DCP async, process")
    run.restores(replace(middle, name=f"restore, {middle.name}", systems=restoring, turns=LONG))
    for case in (
        _case(Size(1 << 28, 300), WITH_VARIANTS, window=4),
        _case(Size(1 << 30, 300), IN_TRAINING, turns=LONG, window=4, what="in training"),
        _case(Size(1 << 30, 3000), MANY, turns=LONG),
        _case(Size(1 << 30, 300, ranks=2), MANY, turns=LONG),
    ):
        yield case.name
        run.case(case, held=8)


def _case(
    size: Size, systems: tuple[str, ...], turns: int = TURNS, window: int = 0, what: str = ""
) -> Case:
    ranks = "1 rank" if size.ranks == 1 else f"{size.ranks} ranks"
    tensors = f"{size.tensors} tensors"
    unit, name = (2**30, "GiB") if size.nbytes % 2**20 == 0 else (10**9, "GB")
    return Case(
        ", ".join(filter(None, (f"{size.nbytes / unit:g} {name}", tensors, ranks, what))),
        size,
        systems,
        turns,
        window,
    )
