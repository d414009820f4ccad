"""A short campaign of a fixed seed, each kind once; ``make chaos`` runs longer campaigns."""

import pytest

from tests.models.chaos.campaign import campaign
from tests.models.chaos.report import Report

KINDS = ["trainer rank killed", "disk errors"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("driver", "kinds"),
    [
        pytest.param("stack", ["writer killed", "network cut"], marks=pytest.mark.slow),
        pytest.param("saver", ["saver killed", "full disk"], marks=pytest.mark.slow),
        ("saver", []),
    ],
)
def test_nothing_is_lost_in_a_short_campaign(driver: str, kinds: list[str]) -> None:
    report = Report(seed=1, minutes=0, driver=driver)
    campaign(report, [*KINDS, *kinds])
    print(report)
    assert not report.problems
    assert report.recoveries.keys() == {*KINDS, *kinds} - {*report.skipped}
    assert report.fates
    assert report.fates.committed
