"""The rules of the version registry: versions, superseded runs, readers, and waits for versions."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.fs.records import decode_record, encode_record
from trinity_sync.storage.runs import Run
from trinity_sync.weights import registry as event_loop
from trinity_sync.weights import state_files
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.state_files import SynchronizerState
from trinity_sync.weights.versions import (
    HISTORY,
    MOST_READERS,
    ImageRef,
    Source,
    Version,
    VersionRegistry,
)


def version(run: int, step: int, source: Source = "memory") -> Version:
    images = (ImageRef("node", "/slot", "abc", 0, 10),) if source == "memory" else ()
    return Version(step, run, source, "/root", images=images)


def registry_of(*keys: tuple[int, int]) -> VersionRegistry:
    registry = VersionRegistry()
    for now, key in enumerate(keys):
        registry.record(version(*key), float(now))
    return registry


def newest_of(registry: VersionRegistry) -> tuple[int, int] | None:
    newest = registry.newest()
    return (newest.run, newest.step) if newest else None


events = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(1, 4), st.integers(0, 9)),
        st.tuples(st.just("run"), st.integers(2, 4), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(events)
def test_the_newest_never_moves_backwards_except_from_superseded_versions(
    events: list[tuple[str, int, int]],
) -> None:
    registry, before = VersionRegistry(), None
    for now, (what, run, step) in enumerate(events):
        if what == "record":
            said = registry.record(version(run, step), float(now))
            assert said == (newest_of(registry) == (run, step))
        elif run not in registry.runs:
            registry.add_runs([Run(run, "key", step)])
        after = newest_of(registry)
        assert after is None or not registry.is_superseded(*after)
        if before is not None and not registry.is_superseded(*before):
            assert after is not None
            assert after >= before
        before = after


@given(events)
def test_a_registry_is_restored_from_its_state(events: list[tuple[str, int, int]]) -> None:
    registry = VersionRegistry()
    for now, (what, run, step) in enumerate(events):
        if what == "record":
            registry.record(version(run, step, "checkpoint" if step % 2 else "memory"), float(now))
            registry.set_serving(f"reader-{step}", step, float(now), run)
        elif run not in registry.runs:
            registry.add_runs([Run(run, "key", step)])
    state = SynchronizerState("job", registry.state)
    read = decode_record(SynchronizerState, encode_record(state).encode(), "")
    again = VersionRegistry(read.registry)
    assert again.newest() == registry.newest()
    assert again.newest("checkpoint") == registry.newest("checkpoint")
    assert again.readers(100.0) == registry.readers(100.0)
    assert again.state == registry.state


def test_a_rewind_restores_what_the_runs_it_undoes_had_superseded() -> None:
    registry = registry_of((1, 30), (2, 25))
    registry.add_runs([Run(1, "key", 0), Run(2, "key", 20)])
    assert newest_of(registry) == (2, 25)
    registry.add_runs([Run(3, "key", 30, resumed_run=1)])
    assert newest_of(registry) is None
    assert not registry.record(version(2, 31), 3.0)
    assert registry.record(version(1, 30, "checkpoint"), 3.0)
    assert not registry.record(version(1, 35), 3.0)
    assert registry.record(version(4, 31), 4.0)


@pytest.mark.parametrize(
    ("than", "run", "newer"),
    [
        (10, None, True),
        (11, None, False),
        (13, None, True),  # run 1's, which training has left
        (9, 2, True),
        (11, 2, False),
        (12, 2, False),
        (11, 1, True),
        (13, 1, True),
    ],
)
def test_a_version_is_newer_by_run_and_step(than: int, run: int | None, newer: bool) -> None:
    registry = registry_of((1, 10), (1, 13))
    registry.add_runs([Run(1, "key", 0), Run(2, "key", 10)])
    registry.record(version(2, 11), 5.0)
    step_or_version = than if run is None else version(run, than)
    assert (registry.newer(step_or_version) is not None) == newer


def test_a_reader_of_an_unknown_step_waits_for_a_later_one() -> None:
    assert registry_of((1, 10)).newer(12) is None
    assert VersionRegistry().newer(-1) is None


def test_memory_is_preferred_to_a_commit_and_both_to_a_broadcast_which_cannot_be_read() -> None:
    registry = VersionRegistry()
    seen = []
    for source in ("nccl", "checkpoint", "memory"):
        registry.record(version(1, 5, source), 0.0)
        seen.append(registry.newest().source)
    assert seen == ["nccl", "checkpoint", "memory"]
    assert registry.newest("checkpoint") == version(1, 5, "checkpoint")
    registry = VersionRegistry()
    dict_of_2 = replace(version(1, 2), images=())
    for each in (version(1, 1), dict_of_2, version(1, 2, "checkpoint"), version(1, 3, "nccl")):
        registry.record(each, 0.0)
    assert registry.newest() == version(1, 3, "nccl")
    assert registry.newest("memory") == dict_of_2
    assert registry.newest("memory", readable=True) == version(1, 1)
    assert registry.newest(readable=True) == version(1, 2, "checkpoint")
    assert registry.newer(version(1, 1), readable=True) == version(1, 2, "checkpoint")
    assert registry.newer(version(1, 2), readable=True) is None
    registry.record(version(1, 3, "checkpoint"), 0.0)
    assert registry.newer(version(1, 2), readable=True) == version(1, 3, "checkpoint")


def test_old_versions_are_removed_except_the_newest_commit_and_readers_are_bounded() -> None:
    registry = VersionRegistry()
    registry.record(version(1, 0, "checkpoint"), 0.0)
    for step in range(1, 10 * HISTORY):
        registry.record(version(1, step), float(step))
    assert len(registry.state.versions) == HISTORY + 1
    assert registry.newest("checkpoint") == version(1, 0, "checkpoint")
    registry = registry_of((1, 1))
    for now in range(MOST_READERS + 5):
        registry.set_serving(f"pod-{now}", 1, float(now), 1)
    names = {reader.name for reader in registry.readers(1e4)}
    assert len(names) == MOST_READERS
    assert "pod-4" not in names


def test_a_reader_is_stale_since_the_next_newer_version() -> None:
    registry = VersionRegistry()
    registry.record(version(1, 5), 10.0)
    registry.set_serving("a", 5, 12.0, 1)
    (fresh,) = registry.readers(15.0)
    assert (fresh.since, fresh.behind, fresh.stale_s) == (12.0, 0, 0.0)
    for step in range(6, 40):
        registry.record(version(1, step), 14.0 + step)
    (stale,) = registry.readers(100.0)
    assert (stale.step, stale.behind, stale.stale_s) == (5, 34, 80.0)
    registry.set_serving("a", 38, 101.0, 1)  # late from the start
    assert registry.readers(102.0)[0].stale_s == 49.0
    registry.set_serving("a", 39, 101.0, 1)
    assert registry.readers(102.0)[0].stale_s == 0.0


@pytest.mark.parametrize(("served", "behind"), [((1, 12), 1), ((1, 9), 2), ((2, 11), 0)])
def test_a_superseded_version_is_as_old_as_the_step_of_the_resume(
    served: tuple[int, int], behind: int
) -> None:
    registry = registry_of((1, 9), (1, 12))
    registry.add_runs([Run(1, "a", 0), Run(2, "b", 10)])
    registry.record(version(2, 11), 0.0)
    registry.set_serving("a", served[1], 0.0, served[0])
    assert registry.readers(0.0)[0].behind == behind


def test_a_version_counts_once_the_images_of_all_ranks_are_there() -> None:
    registry = registry_of()

    def add(step: int, rank: int) -> Version | None:
        image = ImageRef("node", f"/slot{rank}", f"{step}.{rank}", rank, 10)
        return registry.add_image(replace(version(1, step), images=(image,)), 2)

    assert add(4, 1) is None
    assert add(5, 1) is None
    complete = add(5, 0)
    assert complete is not None
    assert [image.image for image in complete.images] == ["5.0", "5.1"]
    registry.record(complete, 0.0)
    assert add(4, 0) is None, "its other image was dropped for a newer version"


def test_a_wait_without_a_limit_has_an_answer_although_its_version_is_dropped_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> Version | None:
        registry = AsyncVersionRegistry(str(root), "actor")
        drop = asyncio.get_running_loop().call_soon_threadsafe
        monkeypatch.setattr(event_loop, "write_state", lambda *_: drop(registry.reset))
        await registry.record(published := Version(7, 1, "memory", str(root)))
        registry.versions.record(published, 0.0)
        return await registry.until(lambda: registry.versions.newest(), None)

    assert asyncio.run(story()) == Version(7, 1, "memory", str(root))


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
