"""The cases that are measured, in order, with the systems that take part in each.

A ratio holds within a case only: its systems took turns with each other and with the limits. Those
of one case hold their memory at the same time, and an idle stack costs CPU time, so there are
several cases of one size: what a user would choose from, what orchestration adds, and what
overlaps.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.cases import Case
from benchmarks.systems import SYSTEMS
from benchmarks.targets import FLOW, ORCHESTRATED, OURS, RECYCLED
from benchmarks.training import Size

if TYPE_CHECKING:
    from benchmarks.run import Run

TURNS = 5
WINDOW = 3
"""Steps of training: a save slows the first ones."""
FIRST = ("trinity_sync", "trinity_sync, prewarmed", "DCP async, process", "torch-checkpointing")
"""Systems whose first save is measured."""
VARIANTS = ("overlapped", "Prefect", "prewarmed", "in place")
EVERYBODY = tuple(name for name in SYSTEMS if not any(word in name for word in VARIANTS))
MAIN = ("trinity_sync", "torch.save", "DCP async, process", "torch-checkpointing")
MANY = ("trinity_sync", "torch.save", "DCP async, thread", "torch-checkpointing")
"""The peers of the least stall, where each turn takes long."""
LARGE = (RECYCLED, "torch.save", "DCP async, thread")
LARGE_WITH_PREFECT = (ORCHESTRATED, "DCP async, thread")
"""Systems for the largest state: more at a time do not fit into 24 GiB."""
WITH_PREFECT = (OURS, RECYCLED, FLOW, ORCHESTRATED, "DCP async, thread")
NEXT = (RECYCLED, ORCHESTRATED, "DCP async, process", "torch-checkpointing")
"""Systems for saves without a pause: they copy first and write then."""
OVERLAPPED = tuple(name for name in SYSTEMS if "overlapped" in name and "Prefect" not in name)


def quick(run: "Run") -> Iterator[str]:
    """Measure one small state and the main peers; yield what comes next."""
    small = make_case(Size(1 << 28, 300), MAIN, turns=3)
    yield small.name
    run.case(small, held=4)
    trained = make_case(small.size, OVERLAPPED, turns=3, window=WINDOW)
    yield trained.name
    run.case(trained, held=4)
    first = replace(make_case(small.size, FIRST, turns=3), name="first save, 0.25 GiB")
    yield first.name
    run.first(first)
    yield "small tensors"
    run.small_tensors(30_000, runs=3)


def full(run: "Run") -> Iterator[str]:
    """Measure everything; yield what comes next."""
    small, middle, large = Size(1 << 28, 300), Size(1 << 30, 300), Size(4 * 10**9, 300)
    alone = make_case(middle, EVERYBODY)
    yield alone.name
    run.case(alone, held=8)
    with run.stack():
        for case, held in (
            (make_case(middle, WITH_PREFECT, what="with Prefect"), 5),
            (make_case(large, LARGE_WITH_PREFECT, turns=3, what="with Prefect"), 3),
            (
                make_case(
                    middle, ("trinity_sync + Prefect, overlapped", *OVERLAPPED), window=WINDOW
                ),
                6,
            ),
            (replace(make_case(middle, NEXT, what="back to back"), back_to_back=True), 6),
            (
                replace(
                    make_case(middle, NEXT, window=WINDOW, what="beside training on both cores"),
                    cores=2,
                ),
                6,
            ),
        ):
            yield case.name
            run.case(case, held)
        yield "orchestration"
        run.orchestration(TURNS)
        yield "small saves, with Prefect"
        run.small_saves(FLOW, TURNS)
    yield "small saves"
    run.small_saves(OURS, TURNS)
    for case, held in (
        (make_case(large, LARGE, turns=3), 3),
        (make_case(small, MAIN), 4),
        (make_case(Size(1 << 30, 3000), MANY), 4),
        (make_case(Size(1 << 30, 300, ranks=2), MANY), 4),
    ):
        yield case.name
        run.case(case, held)
    yield "layout"
    run.fixed_cost(Size(1 << 28, 3000), TURNS)
    yield "small tensors"
    run.small_tensors(30_000, TURNS)
    first = replace(make_case(middle, FIRST), name="first save, 1 GiB")
    yield first.name
    run.first(first)
    yield "memory"
    holding = ("trinity_sync", "trinity_sync, recycled files", "DCP async, process")
    run.memory(replace(make_case(middle, (*holding, "torch-checkpointing")), name="memory, 1 GiB"))
    yield "shared memory over intervals"
    run.shared_over_intervals(middle)
    restoring = ("trinity_sync", "trinity_sync, in place", "veRL", "DCP async, process")
    for size, systems in ((middle, restoring), (replace(middle, ranks=2), restoring[:3])):
        case = make_case(size, systems)
        yield (name := f"restore, {case.name}")
        run.restores(replace(case, name=name))


def make_case(
    size: Size, systems: tuple[str, ...], turns: int = TURNS, window: int = 0, what: str = ""
) -> Case:
    ranks = "1 rank" if size.ranks == 1 else f"{size.ranks} ranks"
    tensors = f"{size.tensors} tensors"
    unit, name = (2**30, "GiB") if size.nbytes % 2**20 == 0 else (10**9, "GB")
    what = what or ("in training" if window else "")
    return Case(
        ", ".join(filter(None, (f"{size.nbytes / unit:g} {name}", tensors, ranks, what))),
        size,
        systems,
        turns,
        window,
    )
