"""The version registry on an event loop, with real files and without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.weights import registry as event_loop
from trinity_sync.weights import state_files
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.versions import Version


def test_waits_return_only_what_a_restart_would_know(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> list[int]:
        loop = asyncio.get_running_loop()

        async def others_go_first() -> None:
            for _ in range(100):
                await asyncio.sleep(0)

        def slowly(*state: Any) -> None:
            asyncio.run_coroutine_threadsafe(others_go_first(), loop).result()
            state_files.write_state(*state)

        async def told() -> int:
            assert await registry.until(registry.versions.newest, None)
            return AsyncVersionRegistry(str(root), "actor").number

        monkeypatch.setattr(event_loop, "write_state", slowly)
        state_files.write_address(root, "synchronizer-x", "test")
        registry = AsyncVersionRegistry(str(root), "actor")
        waits = asyncio.create_task(told())
        await asyncio.sleep(0)
        record = asyncio.create_task(registry.record(Version(7, 1, "memory", str(root))))
        while registry.versions.newest() is None:
            await asyncio.sleep(0)
        comes_late = asyncio.create_task(told())
        await record
        return await asyncio.gather(waits, comes_late)

    assert asyncio.run(story()) == [7, 7]
