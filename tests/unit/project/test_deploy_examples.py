"""The examples of deploy/ are whole, name settings that exist, and hold no secret."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import invoke
from trinity_sync.settings import StackSettings

FOLDER = Path(__file__).parents[3] / "deploy"


def loaded(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


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
    for name in ("ray", "worker", "train"):
        for shared in ("ipc", "network_mode", "pid"):
            assert services[name][shared] == "service:node"  # which nothing restarts
    assert services["node"]["ipc"] == "shareable"
    assert services["node"]["command"] == ["sleep", "infinity"]
    (group,) = loaded("ray-node.yaml")["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["shareProcessNamespace"] is True
    for container in pod["containers"]:
        assert "/dev/shm" in [each["mountPath"] for each in container["volumeMounts"]]


def test_rays_object_store_leaves_the_shared_memory_to_images() -> None:
    (given,) = (
        each.partition("=")[2]
        for each in loaded("compose.yaml")["services"]["ray"]["command"]
        if each.startswith("--object-store-memory=")
    )
    spec = loaded("ray-node.yaml")["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    stores = [given, *(group["rayStartParams"]["object-store-memory"] for group in groups)]
    assert {*map(int, stores)} == {StackSettings().ray.object_store_mb * 10**6}


def test_the_side_car_of_ray_has_the_token_of_its_cluster_and_all_containers_have_limits() -> None:
    spec = loaded("ray-node.yaml")["spec"]
    assert spec["rayVersion"] == version("ray")
    tokens = []
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert {*container["resources"]} == {"requests", "limits"}
            variables = {each["name"]: each for each in container["env"]}
            if "RAY_AUTH_MODE" in variables:
                assert variables["RAY_AUTH_MODE"]["value"] == "token"
                tokens.append((container["name"], variables["RAY_AUTH_TOKEN"]["valueFrom"]))
    assert [name for name, _ in tokens] == ["ray-head", "ray-worker", "flow-worker"]
    assert len({str(token) for _, token in tokens}) == 1


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    command = tmp_path / ".local/bin/trinity-sync"
    command.parent.mkdir(parents=True)
    command.symlink_to("/bin/true")
    units = map(str, sorted((FOLDER / "systemd").glob("*.service")))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", *units],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("systemd/*.service")))
def test_the_commands_of_the_units_exist(name: str) -> None:
    unit = ConfigParser(interpolation=None)
    unit.read(FOLDER / "systemd" / name)
    path, *command = unit["Service"]["ExecStart"].split()
    assert path == "%h/.local/bin/trinity-sync"
    assert invoke(*command, "--help").exit_code == 0


def test_the_images_that_are_named_are_targets_of_the_dockerfile() -> None:
    built = set(re.findall(r"^FROM \S+ AS (\w+)$", (FOLDER / "Dockerfile").read_text(), re.M))
    named = re.findall(r"--target (\w+)", (FOLDER / "compose.yaml").read_text())
    assert built == {*named} == {"client", "stack"}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_settings_of_prefect_exist_and_passwords_come_from_elsewhere(name: str) -> None:
    from prefect.settings import get_current_settings
    from prefect.settings.legacy import _get_valid_setting_names

    named = set(re.findall(r"PREFECT_[A-Z_]+", "\n".join(texts(loaded(name)))))
    assert named - {"PREFECT_AUTH"} <= _get_valid_setting_names(type(get_current_settings()))
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
