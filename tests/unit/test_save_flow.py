"""The order of what follows a commit; the tasks themselves run in tests/integration."""

import asyncio
from pathlib import Path

import pytest

import flows.save
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import ExportError


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_is_requested_after_the_export_even_if_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[str] = []

    def patch(name: str, result: object = None, error: Exception | None = None) -> None:
        async def called(*_: object) -> object:
            calls.append(name)
            if error:
                raise error
            return result

        monkeypatch.setattr(flows.save, name, called)

    class Node:
        persisted = ()

    patch("find_nodes", [Node])
    patch("persist_images")
    patch("commit", True)
    patch("free_remaining_slots")
    patch("upload_if_required")
    patch("export_models", error=ExportError("no config") if fails else None)
    patch("request_replication")
    patch("mark_failed")
    monkeypatch.setattr(flows.save.metrics.METRICS, "count_committed_save", lambda *_, **__: None)

    request = SaveRequest(root=str(tmp_path), step=1, run=1)
    if fails:
        with pytest.raises(ExportError):
            asyncio.run(flows.save.save_step.fn(request))
    else:
        asyncio.run(flows.save.save_step.fn(request))
    assert calls[-2:] == ["export_models", "request_replication"]
