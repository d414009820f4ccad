"""What the benchmark of growth calls too fast."""

from dataclasses import replace

from benchmarks.scale import Cost, judged

ONE = Cost(8, 1, 1, 5, 14, 300, 0.5, 26, 10.0, 0.5)
EIGHT = Cost(64, 8, 1, 40, 112, 300, 4.0, 208, 80.0, 4.0)


def test_growth_like_that_of_the_nodes_is_not_blamed() -> None:
    assert judged([ONE, EIGHT, replace(ONE, ranks=64, catalog_rows=200)]) == []


def test_what_grows_faster_than_the_nodes_is_named() -> None:
    (said,) = judged([EIGHT, replace(ONE, server_cpu_s=0.1)])
    assert said.startswith("server_cpu_s grows faster than the nodes: 0.1 at 1, 4.0 at 8")


def test_calls_that_grow_with_ranks_are_named() -> None:
    (said,) = judged([ONE, replace(ONE, ranks=64, api_calls=100)])
    assert said.startswith("API calls grow with ranks")
