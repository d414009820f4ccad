"""A short campaign with a fixed seed; ``make chaos`` runs longer ones."""

import pytest

from tests.chaos.campaign import campaign
from tests.chaos.report import Report

pytestmark = pytest.mark.slow

KINDS = ["trainer rank killed", "writer killed", "network cut", "full disk", "second trainer"]


@pytest.mark.timeout(560)
def test_nothing_is_lost_in_a_short_campaign() -> None:
    report = Report(seed=1, minutes=3)
    campaign(report, KINDS)
    print(report)
    assert not report.problems
    assert report.recoveries
