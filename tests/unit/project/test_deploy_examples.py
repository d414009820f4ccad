"""The examples of deploy/ are whole, name settings that exist, and hold no secret."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_sync.settings import list_variables

FOLDER = Path(__file__).parents[3] / "deploy"


def loaded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return body


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from (str(key), *texts(each))
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    else:
        yield str(value)


def test_services_name_what_there_is() -> None:
    body = loaded("compose.yaml")
    services = body["services"]
    for name, service in services.items():
        assert "image" in service, name
        assert set(service.get("depends_on", {})) <= set(services), name
        for shared in (service.get("network_mode", ""), service.get("ipc", "")):
            if shared.startswith("service:"):
                assert shared.removeprefix("service:") in services, name
        for volume in service.get("volumes", []):
            source = volume.rpartition(":")[0]
            assert source.startswith("${") or source in body["volumes"], name
        for secret in service.get("secrets", []):
            assert secret in body["secrets"], name
        for config in service.get("configs", []):
            assert config["source"] in body["configs"], name
        for dependency in service.get("depends_on", {}).items():
            if dependency[1]["condition"] == "service_healthy":
                assert "healthcheck" in services[dependency[0]], name


def test_worker_trainer_and_ray_share_memory_host_name_and_processes() -> None:
    services = loaded("compose.yaml")["services"]
    for name in ("worker", "train"):
        for shared in ("ipc", "network_mode", "pid"):
            assert services[name][shared] == "service:ray"
    assert services["ray"]["ipc"] == "shareable"
    assert loaded("ray-node.yaml")["spec"]["shareProcessNamespace"] is True


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_every_setting_of_ours_exists(name: str) -> None:
    known = list_variables()
    named = set(re.findall(r"TRINITY_SYNC_[A-Z_]+", "\n".join(texts(loaded(name)))))
    assert named <= known


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_every_setting_of_prefect_exists(name: str) -> None:
    from prefect.settings.legacy import _get_valid_setting_names

    named = set(re.findall(r"PREFECT_[A-Z_]+", "\n".join(texts(loaded(name)))))
    assert named - {"PREFECT_AUTH"} <= _get_valid_setting_names(type(_settings()))


def _settings() -> Any:
    from prefect.settings import get_current_settings

    return get_current_settings()


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_passwords_come_from_elsewhere(name: str) -> None:
    for text in texts(loaded(name)):
        for password in re.findall(r"//[^/@]*:([^/@]*)@", text):
            assert password.startswith("${")
    environments = [
        service["environment"]
        for service in loaded(name).get("services", {}).values()
        if "environment" in service
    ]
    for environment in environments:
        for variable, value in environment.items():
            if re.search("PASSWORD|AUTH_STRING|TOKEN$", variable):
                assert value.startswith("${")
