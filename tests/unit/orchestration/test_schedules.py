"""Schedules of the deployments: what the settings make of those in prefect.yaml."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate

from trinity_sync.orchestration.deploy import find_time_zone, make_schedule, read_deployments
from trinity_sync.settings import MaintenanceSettings


def schedules(**settings: Any) -> dict[str, DeploymentScheduleCreate]:
    maintenance = MaintenanceSettings(**{"timezone": "Europe/Berlin", **settings})
    made = [
        make_schedule(each, maintenance)
        for entry in read_deployments()
        for each in entry.get("schedules", [])
    ]
    return {schedule.slug.partition(":")[0]: schedule for schedule in made}


def test_everything_is_scheduled_unless_the_settings_say_otherwise_under_another_name() -> None:
    made = schedules()
    assert {name for name in made if made[name].active} == {"nightly", "repair", "hourly"}
    assert made["nightly"].parameters == {"sample_percent": 2}
    assert made["repair"].schedule.interval == timedelta(minutes=15)
    assert {schedule.schedule.timezone for schedule in made.values()} == {"Europe/Berlin"}
    made = schedules(verify="off", repair="1h", timezone="UTC")
    assert not made["nightly"].active
    assert made["repair"].schedule.interval == timedelta(hours=1)
    assert made["hourly"].schedule.timezone == "UTC"
    assert not any(each.active for each in schedules(schedules=False).values())
    before = {name: each.slug for name, each in schedules().items()}
    assert {name: each.slug for name, each in schedules().items()} == before
    after = {name: each.slug for name, each in schedules(verify="3%").items()}
    assert {name for name in before if before[name] != after[name]} == {"nightly"}
    assert all(each.slug.endswith(":paused") for each in schedules(schedules=False).values())


def test_without_a_time_zone_it_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert find_time_zone(MaintenanceSettings()) == "Asia/Tokyo"
    monkeypatch.setenv("TZ", "CET-1CEST")  # no name of a zone
    local = find_time_zone(MaintenanceSettings())
    link = Path("/etc/localtime")
    if link.is_symlink():
        assert str(link.readlink()).endswith(local)
    assert find_time_zone(MaintenanceSettings(timezone="America/Lima")) == "America/Lima"
