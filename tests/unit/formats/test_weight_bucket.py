"""Versions of the weights in an object store: one publisher, readers with a cache on each host."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.formats.test_weight_folder import StateView, model, same, small, weights
from trinity_sync import FolderReader, WeightFolder
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.folder import bucket as of_bucket
from trinity_sync.weights.folder.bucket import Bucket
from trinity_sync.weights.folder.published import MARKER, VERSION_FILE, PublishedVersion

__all__ = ["model"]  # a fixture


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/weights"


def versions_in(s3: Any, bucket: str) -> set[str]:
    listed = s3.list_objects_v2(Bucket=bucket, Prefix="weights/weight_v").get("Contents", [])
    return {each["Key"].split("/")[1] for each in listed}


@pytest.mark.parametrize("deltas", [0, 2])
def test_two_readers_with_caches_of_their_own_follow_bit_equal(
    deltas: int, url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_bucket, "CHUNK", 1000)  # several ranges of each file
        folder = WeightFolder(url, model, deltas=deltas, cache=tmp_path / "publisher")
        early, late = (FolderReader(url, cache=tmp_path / name) for name in ("one", "two"))
        for step in range(1, 7):
            published = folder.publish(StateView(step, weights(step)))
            assert folder.latest() == published
            assert same(early.load(), weights(step))
        assert same(late.load(), weights(6))
    complete = published.version if published.base is None else 4
    assert published.base == (5 if deltas else None)
    whole = tmp_path / f"two/weight_v{complete:06d}"  # an engine loads it from there
    assert json.loads((whole / "config.json").read_text())["model_type"] == "qwen2"
    kept = {f"weight_v{number:06d}" for number in ((4, 5, 6) if deltas else (5, 6))}
    assert versions_in(s3, bucket) == kept
    assert {path.name for path in (tmp_path / "one").glob("weight_v*")} == kept - (
        set() if deltas else {"weight_v000005"}
    )


def test_a_publisher_on_another_host_goes_on_where_the_last_one_ended(
    url: str, tmp_path: Path, model: Path
) -> None:
    WeightFolder(url, model, cache=tmp_path / "one").publish(StateView(5, small(5)))
    other = WeightFolder(url, model, cache=tmp_path / "two")
    assert other.publish(StateView(5, small(5))).version == 1
    with pytest.raises(ConfigError, match="it comes before"):
        other.publish(StateView(4, small(4)))
    assert other.publish(StateView(6, small(6))).version == 2


class Meanwhile(StateView):
    """A version that is read while another process publishes."""

    other: WeightFolder

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.other.publish(StateView(2, small(2)))
        yield from super().iter_tensors()


def test_of_two_publishers_at_a_time_one_is_refused(url: str, tmp_path: Path, model: Path) -> None:
    one, other = (WeightFolder(url, model, cache=tmp_path / name) for name in ("one", "other"))
    one.publish(StateView(1, small(1)))
    view = Meanwhile(3, small(3))
    view.other = other
    with pytest.raises(WeightSyncError, match="another process publishes into s3://"):
        one.publish(view)
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(2))
    assert one.publish(StateView(3, small(3))).version == 3


class Slow(Bucket):
    """A publisher that another one overtakes, before or after it has looked at the marker again."""

    other: WeightFolder
    is_after: bool

    def overtake(self) -> None:
        self.newest = self.other.publish(StateView(2, small(2)))

    def push(self, version: PublishedVersion, record: bytes) -> None:
        self.is_pushing = True
        if not self.is_after:
            self.overtake()
        super().push(version, record)

    def _read(self, name: str) -> bytes | None:
        found = super()._read(name)
        if name == MARKER and self.is_after and vars(self).pop("is_pushing", False):
            self.overtake()
        return found


@pytest.mark.parametrize(
    ("protocol", "is_after"),
    [("s3", False), ("s3", True), ("memory", False)],
    ids=["S3", "S3, in between", "a store without conditions"],
)
def test_a_marker_that_another_publisher_has_replaced_meanwhile_stays(
    protocol: str, is_after: bool, bucket: str, tmp_path: Path, model: Path
) -> None:
    url = f"{protocol}://{bucket}/weights"
    slow, other = Slow(url, tmp_path), WeightFolder(url, model, cache=tmp_path / "other")
    slow.other, slow.is_after = other, is_after
    other.publish(StateView(1, small(1)))
    latest = slow.read_latest()
    assert latest
    (folder := tmp_path / "weight_v000100").mkdir()
    with pytest.raises(WeightSyncError, match="another process publishes into"):
        slow.push(replace(latest, folder=folder), b"late")
    assert other.latest() == slow.newest


def test_what_a_publisher_left_that_died_is_never_read_and_removed_later(
    url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    folder = WeightFolder(url, model, cache=tmp_path / "publisher", keep=1)
    folder.publish(StateView(1, small(1)))
    key = f"weights/weight_v000002/{VERSION_FILE}"
    s3.put_object(Bucket=bucket, Key=key, Body=b"{}")
    reader = FolderReader(url, cache=tmp_path / "reader")
    assert same(reader.load(), small(1))
    assert folder.publish(StateView(2, small(2))).version == 3
    assert same(reader.load(), small(2))
    assert versions_in(s3, bucket) == {"weight_v000003"}


def test_a_cache_that_was_altered_is_fetched_again(url: str, tmp_path: Path, model: Path) -> None:
    folder = WeightFolder(url, model, cache=tmp_path / "publisher")
    folder.publish(StateView(1, small(1)))
    FolderReader(url, cache=tmp_path / "reader").load()
    file = tmp_path / "reader/weight_v000001/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = FolderReader(url, cache=tmp_path / "reader")
    with pytest.raises(WeightSyncError, match="is corrupted"):
        again.load()
    assert same(again.load(), small(1))


def test_a_url_needs_a_cache_and_a_folder_none(url: str, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="pass cache=FOLDER"):
        FolderReader(url)
    with pytest.raises(ConfigError, match="with a folder, pass none"):
        WeightFolder(tmp_path / "out", model, cache=tmp_path / "cache")
