"""Short campaigns of a fixed seed, each kind once; ``make chaos`` runs longer ones."""

import pytest

from tests.models.chaos.campaign import campaign
from tests.models.chaos.report import Report


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("driver", "kinds"),
    [("stack", ["writer killed", "network cut"]), ("saver", ["saver killed", "full disk"])],
)
def test_nothing_is_lost_in_a_short_campaign(driver: str, kinds: list[str]) -> None:
    kinds = ["trainer rank killed", "disk errors", *kinds]
    report = Report(seed=1, minutes=0, driver=driver)
    campaign(report, kinds)
    print(report)
    assert not report.problems
    assert report.recoveries.keys() == {*kinds} - {*report.skipped}
    assert report.fates
    assert report.fates.committed
