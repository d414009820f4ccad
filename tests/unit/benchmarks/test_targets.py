"""What the bench says of the figures that are promised."""

from dataclasses import replace

import pytest

from benchmarks.scale import TARGETS, Cost, judged, missed, reckon
from benchmarks.targets import MEMORY, OURS, TRAINED, Medians, Result, results

OVERLAPPED = "trinity_sync, overlapped"


def of(figure: str, medians: Medians) -> Result:
    return next(each for each in results(medians) if each.target.figure == figure)


def loss(ours: float, **peers: float) -> Result:
    names = {"torch": "torch.save", "process": "DCP async, process", "beside": "DCP async, thread"}
    medians = {(TRAINED, names[peer], "loss a save"): value for peer, value in peers.items()}
    if "beside" in peers:
        medians[TRAINED, "DCP async, thread, overlapped", "loss a save"] = peers["beside"] / 2
    medians[TRAINED, OVERLAPPED, "loss a save"] = ours
    found = [each for each in results(medians) if each.target.above[1] == OVERLAPPED]
    return next(each for each in found if "loss" in each.target.figure)


def test_the_best_peer_is_the_lowest_of_all_their_variants() -> None:
    assert loss(0.1, torch=2.0, process=0.5).value == 0.2
    assert loss(0.1, torch=2.0, process=0.5, beside=0.5).value == 0.4


def test_what_was_not_measured_or_is_lost_in_the_noise_is_not_met() -> None:
    assert loss(0.1).value is None
    assert not loss(0.1, torch=-0.01).met
    assert loss(-0.01, torch=0.2).met


def test_a_figure_may_be_bounded_by_itself() -> None:
    figure = "extra memory a byte of state, two slots"
    assert of(figure, {(MEMORY, OURS, "memory a byte"): 2.0}).met
    assert not of(figure, {(MEMORY, OURS, "memory a byte"): 2.2}).met
    assert not of(figure, {}).met


ONE = Cost(
    ranks=8,
    nodes=1,
    task_runs=5,
    api_calls=14,
    rank_0_calls=3,
    parameter_bytes=300,
    trigger_to_commit_s=0.4,
    trigger_to_end_s=0.5,
    server_cpu_s=0.5,
    worker_cpu_s=0.3,
    rank_cpu_ms=5.0,
    rank_0_cpu_s=0.1,
    database_rows=50,
    database_kb=100,
    catalog_rows=1,
    catalog_cpu_ms=10.0,
)
EIGHT = replace(
    ONE,
    ranks=64,
    nodes=8,
    task_runs=40,
    api_calls=112,
    trigger_to_commit_s=3.2,
    trigger_to_end_s=4.0,
    server_cpu_s=4.0,
    worker_cpu_s=2.4,
    database_rows=400,
    database_kb=800,
)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ([ONE, EIGHT, replace(ONE, ranks=64, catalog_rows=200)], ""),  # like the nodes
        (
            [EIGHT, replace(ONE, server_cpu_s=0.1)],
            "server_cpu_s grows faster than the nodes: 0.1 at 1, 4.0 at 8",
        ),
        (
            [ONE, replace(EIGHT, rank_cpu_ms=10.0)],
            "rank_cpu_ms grows with the ranks: 5.0 at 1, 10.0 at 8",
        ),
        ([ONE, replace(ONE, ranks=64, api_calls=100)], "API calls grow with ranks"),
    ],
)
def test_what_grows_faster_than_the_nodes_or_with_the_ranks_is_named(
    costs: list[Cost], said: str
) -> None:
    assert [each[: len(said)] for each in judged(costs)] == [said] * bool(said)


def test_a_target_that_is_missed_is_named() -> None:
    assert missed(ONE) == []
    (said,) = missed(replace(ONE, task_runs=2049))
    assert said == f"target missed: task_runs is 2049, at most {TARGETS['task_runs']}"


def test_ten_thousand_nodes_are_on_the_line_through_two_sizes() -> None:
    assert "50,000 task runs" in reckon(ONE, EIGHT)
    assert "5,000.0 CPU seconds of the server (104.2% of 8 cores" in reckon(ONE, EIGHT)
