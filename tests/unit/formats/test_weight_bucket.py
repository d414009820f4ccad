"""Versions of the weights in an object store: one publisher, readers with a cache on each host."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.formats.test_weight_folder import StateView, model, same, small, weights
from trinity_sync import FolderReader, WeightFolder
from trinity_sync.errors import (
    ConfigError,
    DeltaError,
    LockTimeoutError,
    RemoteError,
    WeightSyncError,
)
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.weights.folder import bucket as of_bucket
from trinity_sync.weights.folder import reader as of_reader
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


def test_a_reader_fetches_nothing_while_another_one_of_its_cache_does(
    url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    WeightFolder(url, model, cache=tmp_path / "publisher").publish(StateView(5, small(5)))
    monkeypatch.setattr(of_bucket, "_LOCK_S", 0.0)
    with acquire_file_lock(cache / ".reader.lock"):
        with pytest.raises(LockTimeoutError):
            FolderReader(url, cache=cache).load()
        assert [path.name for path in cache.iterdir()] == [".reader.lock"]
    assert same(FolderReader(url, cache=cache).load(), small(5))


def test_a_publisher_on_another_host_goes_on_where_the_last_one_ended_but_not_two_jobs_in_turn(
    url: str, tmp_path: Path, model: Path
) -> None:
    WeightFolder(url, model, cache=tmp_path / "one").publish(StateView(5, small(5)))
    other = WeightFolder(url, model, cache=tmp_path / "two")
    assert other.publish(StateView(5, small(5))).version == 1
    assert other.publish(StateView(4, small(4))).step == 5
    assert other.publish(StateView(6, small(6))).version == 2
    third = WeightFolder(url, model, cache=tmp_path / "three")
    third.publish(StateView(1, small(1), identity="other", root="theirs"))
    with pytest.raises(WeightSyncError, match="is of the job in theirs, whose publisher lives"):
        other.publish(StateView(7, small(7)))
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(1))


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
    (folder := tmp_path / "weight_v000100").mkdir()
    with pytest.raises(WeightSyncError, match="another process publishes into"):
        slow.push(replace(latest, folder=folder), b"late")
    assert other.latest() == slow.newest


@pytest.mark.parametrize("keep", [1, "all"])
def test_what_a_publisher_left_that_died_is_never_read_and_removed_later(
    keep: Any, url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    folder = WeightFolder(url, model, cache=tmp_path / "publisher", keep=keep)
    folder.publish(StateView(1, small(1)))
    key = f"weights/weight_v000002/{VERSION_FILE}"
    s3.put_object(Bucket=bucket, Key=key, Body=b"{}")
    reader = FolderReader(url, cache=tmp_path / "reader")
    assert same(reader.load(), small(1))
    assert folder.publish(StateView(2, small(2))).version == 3
    assert same(reader.load(), small(2))
    kept = {"weight_v000001", "weight_v000003"} if keep == "all" else {"weight_v000003"}
    assert versions_in(s3, bucket) == kept


def test_a_history_is_in_the_bucket_whatever_the_caches_still_have(
    url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    published = []
    for host in ("one", "two"):
        cache = tmp_path / host
        folder = WeightFolder(url, model, deltas=1, keep="all", cache=cache)
        for step in range(len(published) + 1, len(published) + 5):
            published.append(folder.publish(StateView(step, small(step))))
        assert len(list(cache.glob("weight_v*"))) == 2  # the last delta, and what it builds on
    assert len(versions_in(s3, bucket)) == 8
    reader = FolderReader(url, cache=tmp_path / "reader")
    assert [each.step for each in reader.list_versions()] == list(range(1, 9))
    for version in (published[5], published[0], published[7], published[2]):
        assert same(reader.load(version), small(version.step))
    Bucket(url, tmp_path / "any").remove_old(2, ())
    with pytest.raises(DeltaError, match="version 1 is missing in"):
        FolderReader(url, cache=tmp_path / "new").load(published[0])


@pytest.mark.parametrize("protocol", ["s3", "memory"])
def test_old_versions_are_removed_at_the_very_url_whatever_other_paths_it_matches(
    protocol: str, bucket: str, tmp_path: Path, model: Path
) -> None:
    urls = [f"{protocol}://{bucket}/removed/{name}" for name in ("w1", "w[1]")]
    for number, url in enumerate(urls):
        folder = WeightFolder(url, model, cache=tmp_path / str(number), keep=1)
        for step in range(1, 2 + number):
            folder.publish(StateView(step, small(step)))
    plain, other = (Bucket(url, tmp_path / "unused").list_numbers() for url in urls)
    assert (plain, other) == ([1], [2])
    assert same(FolderReader(urls[0], cache=tmp_path / "reader").load(), small(1))


def test_an_outage_of_the_store_does_not_end_a_reader_that_waits(
    url: str, tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = WeightFolder(url, model, cache=tmp_path / "publisher")
    folder.publish(StateView(1, small(1)))

    class Down(Bucket):
        looks = 0

        def read_latest(self) -> PublishedVersion | None:
            self.looks += 1
            if self.looks < 3:
                raise RemoteError("no route to host")
            return super().read_latest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_reader, "BUCKET_POLL_S", 0.01)
        reader, new = (FolderReader(url, cache=tmp_path / name) for name in ("one", "other"))
        reader.load()
        published = folder.publish(StateView(2, small(2)))
        reader._bucket, new._bucket = (Down(url, tmp_path / name) for name in ("one", "other"))
        assert asyncio.run(reader.wait_newer()).version == published.version
        with pytest.raises(RemoteError, match="no route"):
            asyncio.run(new.wait_newer())
    assert caplog.messages.count("waiting: no route to host") == 1


def test_a_reader_that_waits_for_its_first_version_names_where_and_has_a_cache_of_a_url(
    url: str, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Path
) -> None:
    reader = FolderReader(url.replace(bucket, "misspelled"), cache=tmp_path)
    assert asyncio.run(reader.wait_newer(timeout_s=0)) is None
    assert "nothing was published in s3://misspelled/weights yet" in caplog.text
    with pytest.raises(WeightSyncError, match="nothing was published in s3://misspelled/weights"):
        reader.load()
    with pytest.raises(ConfigError, match="pass cache=FOLDER"):
        FolderReader(url)
    with pytest.raises(ConfigError, match="with a folder, pass none"):
        WeightFolder(tmp_path / "out", model, cache=tmp_path / "cache")


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("file", ["model.safetensors", VERSION_FILE])
@pytest.mark.parametrize("alter", [flip, lambda content: content[:99], None])
def test_a_cache_that_was_altered_is_fetched_again(
    file: str, alter: Callable[[bytes], bytes] | None, url: str, tmp_path: Path, model: Path
) -> None:
    WeightFolder(url, model, cache=tmp_path / "publisher").publish(StateView(1, small(1)))
    FolderReader(url, cache=tmp_path / "reader").load()
    path = tmp_path / "reader/weight_v000001" / file
    if alter:
        path.write_bytes(alter(path.read_bytes()))
    else:
        path.unlink()
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(1))


def test_versions_that_were_altered_in_the_bucket_are_refused(
    url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    WeightFolder(url, model, cache=tmp_path / "publisher").publish(StateView(1, small(1)))
    where = {"Bucket": bucket, "Key": "weights/weight_v000001/model.safetensors"}
    s3.put_object(**where, Body=flip(s3.get_object(**where)["Body"].read()))
    with pytest.raises(WeightSyncError, match="is corrupted"):
        FolderReader(url, cache=tmp_path / "reader").load()


def test_a_cache_of_what_the_bucket_had_before_it_was_emptied_is_fetched_again(
    url: str, s3: Any, bucket: str, tmp_path: Path, model: Path
) -> None:
    for step, job in ((1, "one"), (9, "two")):
        for key in [each["Key"] for each in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]:
            s3.delete_object(Bucket=bucket, Key=key)
        folder = WeightFolder(url, model, deltas=2, cache=tmp_path / "publisher")
        folder.publish(StateView(step, small(step), identity=job))
        reader = FolderReader(url, cache=tmp_path / "reader")
        assert same(reader.load(), small(step))
        folder.publish(StateView(step + 1, small(step + 1), identity=job))
        assert same(reader.load(), small(step + 1))


def test_a_disk_that_takes_a_part_of_each_write_gets_all_of_a_file(
    url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WeightFolder(url, model, cache=tmp_path / "publisher").publish(StateView(1, small(1)))
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: write(fd, content[:700], at))
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(1))


@pytest.mark.parametrize("name", [VERSION_FILE, MARKER])
def test_a_publisher_whose_answer_was_lost_is_no_other_process(
    name: str, url: str, tmp_path: Path, model: Path
) -> None:
    """S3's client repeats a request whose answer was lost, and its own file is there already."""

    class Repeating(Bucket):
        def _create(self, path: str, content: bytes) -> bool:
            is_first = super()._create(path, content)
            return super()._create(path, content) if path.endswith(name) else is_first

    folder = WeightFolder(url, model, cache=tmp_path / "publisher")
    folder._bucket = Repeating(url, tmp_path / "publisher")
    folder.publish(StateView(1, small(1)))
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(1))


def test_a_store_that_refuses_removals_has_the_version_all_the_same(
    url: str,
    s3: Any,
    bucket: str,
    tmp_path: Path,
    model: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = WeightFolder(url, model, keep=1, cache=tmp_path / "publisher")
    folder.publish(StateView(1, small(1)))

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not authorized to perform: s3:DeleteObject")

    monkeypatch.setattr(folder._bucket._fs, "rm", refuse)
    assert folder.publish(StateView(2, small(2))).version == 2
    assert same(FolderReader(url, cache=tmp_path / "reader").load(), small(2))
    assert versions_in(s3, bucket) == {"weight_v000001", "weight_v000002"}
    assert "s3:DeleteObject" in caplog.text
