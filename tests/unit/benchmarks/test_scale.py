"""What the benchmark of growth calls too fast, too much, and makes of what it has measured."""

from dataclasses import replace

from benchmarks.scale import TARGETS, Cost, judged, missed, reckon

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


def test_growth_like_that_of_the_nodes_is_not_blamed() -> None:
    assert judged([ONE, EIGHT, replace(ONE, ranks=64, catalog_rows=200)]) == []


def test_what_grows_faster_than_the_nodes_is_named() -> None:
    (said,) = judged([EIGHT, replace(ONE, server_cpu_s=0.1)])
    assert said.startswith("server_cpu_s grows faster than the nodes: 0.1 at 1, 4.0 at 8")


def test_a_rank_that_works_more_among_more_ranks_is_named() -> None:
    (said,) = judged([ONE, replace(EIGHT, rank_cpu_ms=10.0)])
    assert said.startswith("rank_cpu_ms grows with the ranks: 5.0 at 1, 10.0 at 8")


def test_calls_that_grow_with_ranks_are_named() -> None:
    (said,) = judged([ONE, replace(ONE, ranks=64, api_calls=100)])
    assert said.startswith("API calls grow with ranks")


def test_a_target_that_is_missed_is_named() -> None:
    assert missed(ONE) == []
    (said,) = missed(replace(ONE, task_runs=2049))
    assert said == f"target missed: task_runs is 2049, at most {TARGETS['task_runs']}"


def test_ten_thousand_nodes_are_on_the_line_through_two_sizes() -> None:
    assert "50,000 task runs" in reckon(ONE, EIGHT)
    assert "5,000.0 CPU seconds of the server (104.2% of 8 cores" in reckon(ONE, EIGHT)
