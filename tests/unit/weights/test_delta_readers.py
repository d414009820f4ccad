"""Readers that keep a base have the trainer's weights bit for bit, by deltas or in full."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job import Job
from tests.support.meanwhile import when_opened
from tests.support.weights import State, VersionFile, digest, first, train, upload
from trinity_sync.errors import WeightSyncError
from trinity_sync.weights.delta import Change
from trinity_sync.weights.object_store import compute_delta
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.versions import Version, VersionUnavailableError


@dataclass(frozen=True)
class Altering(VersionFile):
    """Of whose deltas a bit is flipped on the way."""

    def fetch_images(self, *asked: Any) -> list[Any]:
        found = super().fetch_images(*asked)
        if len(asked) > 3:
            content, checksum = found[-1][-1]
            found[-1][-1] = Change(content[:-1] + bytes([content[-1] ^ 1]), checksum)
        return found


@dataclass(frozen=True)
class OfAnotherBase(VersionFile):
    """Whose deltas lead from what the reader has not got."""

    def fetch_images(self, version: Version, *asked: Any) -> list[Any]:
        if len(asked) > 2:
            asked = (*asked[:2], version, *asked[3:])
        return super().fetch_images(version, *asked)


class NotAsked(VersionFile):
    """Of whose images and deltas none is fetched."""

    def fetch_images(self, *asked: Any) -> list[Any]:
        raise AssertionError(asked)


@pytest.fixture
def versions(tmp_path: Path) -> VersionFile:
    return VersionFile(tmp_path / "version.json", node="there")


@pytest.fixture
def trained() -> State:
    return first()


@pytest.fixture
def next_version(job: Job, versions: VersionFile, trained: State) -> Callable[..., Version]:
    """Train and upload a step, and tell of it."""

    def make(step: int, *, run: int = 1, told: bool = True) -> Version:
        train(trained, step)
        version = upload(job, step, trained, run=run)
        if told:
            versions.tell(version)
        return version

    return make


def require_has(reader: WeightReader, step: int, trained: State, *, by_delta: bool) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    target["0.tied"] = target["0.w"]
    assert reader.load_into(target) == step
    assert digest(target) == digest(trained)
    if by_delta:
        assert reader.delta_bytes is not None
        assert 0 < reader.delta_bytes < 0.04 * trained["0.w"].nbytes
    else:
        assert reader.delta_bytes is None


def test_a_reader_that_skipped_versions_reads_a_full_version_and_then_deltas(
    versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    next_version(1)
    require_has(reader, 1, trained, by_delta=False)
    next_version(2)
    require_has(reader, 2, trained, by_delta=True)
    next_version(3, told=False)
    next_version(4)
    require_has(reader, 4, trained, by_delta=False)
    next_version(5)
    require_has(reader, 5, trained, by_delta=True)


def test_a_bfloat16_reader_of_float32_masters_reads_small_deltas(
    job: Job, versions: VersionFile
) -> None:
    masters = {"w": torch.randn(300_000), "b": torch.ones(7), "at": torch.tensor([1])}
    target = {"w": torch.zeros(300_000).bfloat16(), "b": torch.zeros(7).bfloat16()}
    target["at"] = torch.zeros(1, dtype=torch.long)
    reader = WeightReader(versions, name="explorer", deltas=True, dtype=torch.bfloat16)
    for step in (1, 2, 3):
        masters["w"] *= 1 + 1e-5
        masters["at"] += 1
        versions.tell(upload(job, step, masters))
        assert reader.load_into(target) == step
        assert all(torch.equal(target[name], masters[name].to(target[name])) for name in masters)
        came = reader.delta_bytes
        assert came is None if step == 1 else 0 < came < 0.02 * masters["w"].nbytes
        given = dict(reader.iter_weights())
        assert all(torch.equal(given[name], target[name]) for name in masters)


def test_a_reader_rounds_only_with_a_dtype(job: Job, versions: VersionFile) -> None:
    masters = {"w": torch.randn(5000)}
    versions.tell(upload(job, 1, masters))
    target = {"w": torch.zeros(5000).bfloat16()}
    with pytest.raises(
        WeightSyncError, match=r"float32 .* into torch.bfloat16 .*dtype="
    ) as refused:
        WeightReader(versions, name="explorer").load_into(target)
    assert "Nothing was loaded" in str(refused.value)
    WeightReader(versions, name="explorer", dtype=torch.bfloat16).load_into(target)
    assert torch.equal(target["w"], masters["w"].bfloat16())


def test_a_version_that_a_reader_has_already_costs_nothing(
    versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    next_version(1)
    require_has(reader, 1, trained, by_delta=False)
    assert dict(reader.iter_weights()).keys() == {"0.w", "0.b"}
    assert reader.delta_bytes == 0


@pytest.mark.parametrize("wrong", [Altering, OfAnotherBase])
def test_a_delta_that_is_altered_or_of_another_base_is_not_used(
    wrong: type[VersionFile],
    versions: VersionFile,
    trained: State,
    next_version: Callable[..., Version],
) -> None:
    reader = WeightReader(wrong(versions.path, versions.node), name="explorer", deltas=True)
    for step in (1, 2, 3):
        next_version(step)
        require_has(reader, step, trained, by_delta=False)


def test_a_base_that_was_altered_is_not_used(
    versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    next_version(1)
    with reader.open() as view:
        view.images[0][9000] ^= 1
    next_version(2)
    require_has(reader, 2, trained, by_delta=False)
    next_version(3)
    require_has(reader, 3, trained, by_delta=True)


def test_a_resumed_run_is_read_by_a_delta_from_the_superseded_version(
    job: Job, versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    for step in (8, 9):
        next_version(step)
        require_has(reader, step, trained, by_delta=step == 9)
    job.stagers.clear()  # as after a kill: the slots stay
    next_version(4, run=2)
    require_has(reader, 4, trained, by_delta=True)
    assert reader.version
    assert reader.version.run == 2


def test_images_of_the_readers_node_are_read_in_place(
    versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(NotAsked(versions.path, node="here"), name="explorer", deltas=True)
    for step in (1, 2):
        next_version(step)
        require_has(reader, step, trained, by_delta=False)


def test_a_version_of_another_layout_is_read_in_full(
    job: Job, versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    next_version(1)
    require_has(reader, 1, trained, by_delta=False)
    trained["0.more"] = torch.ones(5)
    next_version(2)
    require_has(reader, 2, trained, by_delta=False)


def test_an_open_version_does_not_change_when_another_is_loaded(
    versions: VersionFile, trained: State, next_version: Callable[..., Version]
) -> None:
    reader = WeightReader(versions, name="explorer", deltas=True)
    next_version(1)
    before = digest(trained)
    with reader.open() as view:
        next_version(2)
        require_has(reader, 2, trained, by_delta=False)
        target = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
        view.load_into(target)
    assert digest(target) == before


def test_a_trainer_does_not_wait_for_a_delta_in_progress(
    job: Job, next_version: Callable[..., Version]
) -> None:
    """It fills the slot of the base meanwhile, and the delta is given up."""
    base, version = next_version(1), next_version(2)
    with (
        when_opened(Path(version.images[0].slot), lambda: next_version(3)),
        pytest.raises(VersionUnavailableError, match="was overwritten"),
    ):
        compute_delta(base.images[0], version.images[0])
    assert len(list(job.spool.folder.glob("*.slot"))) == 2


def test_a_base_that_was_removed_with_its_trainer_gives_no_delta(
    job: Job, next_version: Callable[..., Version]
) -> None:
    base, version = next_version(1), next_version(2)
    job.stagers.pop(0).close()
    with pytest.raises(VersionUnavailableError):
        compute_delta(base.images[0], version.images[0])
