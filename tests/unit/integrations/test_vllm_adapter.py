"""`VLLMAdapter` against a server with vLLM's calls, and an engine that is none.

``tests/environments/vllm`` has the same with the real engine.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.answers import serving
from tests.unit.formats.test_weight_folder import StateView
from trinity_sync import WeightFolder, WeightSyncError
from trinity_sync.integrations.vllm.adapter import VLLMAdapter
from trinity_sync.weights.folder.published import PublishedVersion


@pytest.fixture
def offered() -> dict[str, str]:
    """Paths of the adapters that the server offers, by name."""
    return {}


@pytest.fixture
def url(offered: dict[str, str]) -> Iterator[str]:
    def answer(request: BaseHTTPRequestHandler, text: str) -> tuple[int, str]:
        if request.command == "GET":
            models = [{"id": n, "root": p, "parent": "base"} for n, p in offered.items()]
            return 200, json.dumps({"data": [{"id": "base", "root": "base"}, *models]})
        body = json.loads(text)
        if request.path == "/v1/load_lora_adapter" and body["lora_name"] not in offered:
            offered[body["lora_name"]] = body["lora_path"]
        elif request.path == "/v1/unload_lora_adapter" and body["lora_name"] in offered:
            del offered[body["lora_name"]]
        else:
            return 404, "no such call, or adapter"
        return 200, "Success: no JSON"

    with serving(answer) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> WeightFolder:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    return WeightFolder(tmp_path / "out", tmp_path / "adapter")


def publish(folder: WeightFolder, step: int) -> PublishedVersion:
    return folder.publish(StateView(step, {"lora_A.weight": torch.full((3,), float(step))}))


def test_a_server_offers_the_last_two_versions_also_after_the_folder_was_emptied(
    folder: WeightFolder, url: str, offered: dict[str, str]
) -> None:
    adapter, names = VLLMAdapter(url), []
    for step in (1, 2, 3):
        version = publish(folder, step)
        names.append(adapter.load(version))
        assert names[-1] == f"policy-{step}-{version.checksum[:8]}"
        assert [*offered] == names[-2:]
    assert adapter.load(version) == names[-1]
    assert [*offered] == names[-2:]
    with pytest.raises(WeightSyncError, match=r"answered 404.*VLLM_ALLOW_RUNTIME"):
        VLLMAdapter(f"{url}/elsewhere").load(publish(folder, 4))
    shutil.rmtree(folder.out)
    for step in (11, 12, 13):
        version = publish(folder, step)
        names.append(adapter.load(version))
        assert [*offered] == names[-2:]
        assert offered[names[-1]] == str(version.folder)
    assert len({*names}) == 6

    shutil.rmtree(folder.out)
    again = [adapter.load(publish(folder, step)) for step in (21, 22, 23)]
    assert [*offered] == again[1:]


def test_a_name_is_that_of_one_job_while_its_publisher_lives(
    folder: WeightFolder, url: str, offered: dict[str, str], tmp_path: Path
) -> None:
    name = VLLMAdapter(url).load(publish(folder, 1))
    other = WeightFolder(tmp_path / "theirs", tmp_path / "adapter")
    weights = {"lora_A.weight": torch.full((3,), 7.0)}
    theirs = other.publish(StateView(1, weights, identity="other", root="theirs"))
    with pytest.raises(WeightSyncError, match=r"policy .* is that of the job in ckpts, published"):
        VLLMAdapter(url).load(theirs)
    assert [*offered] == [name]
    assert {name, VLLMAdapter(url, name="theirs").load(theirs)} == {*offered}
    del folder._living  # as its process ends
    VLLMAdapter(url).load(theirs)
    assert name not in offered


def test_an_engine_of_this_process_loads_a_new_version_under_an_old_path(
    folder: WeightFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules,
        "vllm.lora.request",
        SimpleNamespace(LoRARequest=lambda *values: values),  # type: ignore[arg-type]
    )
    loaded: dict[int, tuple[str, int, str]] = {}
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(add_lora=lambda request: loaded.setdefault(request[1], request))
    )
    first = VLLMAdapter(llm).load(publish(folder, 1))
    assert VLLMAdapter(llm).load(publish(folder, 1)) == first
    shutil.rmtree(folder.out)
    second = VLLMAdapter(llm).load(publish(folder, 2))
    assert second[2] == first[2]
    assert [*loaded.values()] == [first, second]
    assert second[0] != first[0]
