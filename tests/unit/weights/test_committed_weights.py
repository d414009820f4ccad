"""Committed weights: their versions, and the folders that are safe to load."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.path_calls import watch_path_calls
from benchmarks.restarts import commit_step
from trinity_sync.layout import Kind, shard_file, step_folder
from trinity_sync.storage.manifest import FileRecord, Manifest, write_manifest
from trinity_sync.weights.committed import find_committed_version, find_model_path
from trinity_sync.weights.version_view import VersionOpener
from trinity_sync.weights.versions import Version, VersionUnavailableError

NOW = 1.7e9
Commit = Callable[..., Path]


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Commits a step of one shard and further files; returns the actor's folder."""

    def committed(step: int, *more: str, run: int = 1, kind: Kind = "state_dict") -> Path:
        folder = step_folder(tmp_path, step)
        names = ("actor/model_world_size_1_rank_0.pt", *more)
        for name in names:
            write(folder / name, NOW)
        files = tuple(FileRecord(name, 7, "xxh3-128:0", "actor", "model") for name in names)
        write_manifest(tmp_path, Manifest("job", run, step, (kind,), files, (), NOW))
        return folder / "actor"

    return committed


def write(path: Path, at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    os.utime(path, (at, at))


def test_the_newest_commit_is_a_version_whatever_the_latest_pointer_says(
    tmp_path: Path, commit: Commit
) -> None:
    (tmp_path / "latest_state_dict_iteration.txt").write_text("")
    assert find_committed_version(tmp_path, "actor") is None
    commit(3)
    newest = commit(12)
    commit(14, kind="checkpoint")
    assert find_committed_version(tmp_path, "actor") == Version(12, 1, "checkpoint", str(tmp_path))
    assert find_model_path(tmp_path, "actor") == newest
    assert find_committed_version(tmp_path, "critic") is None


def test_a_folder_that_is_not_committed_is_not_loaded_from(tmp_path: Path, commit: Commit) -> None:
    whole = commit(3)
    write(step_folder(tmp_path, 4) / "actor" / "model_world_size_1_rank_0.pt", NOW)
    (commit(5) / "model_world_size_1_rank_0.pt").write_bytes(b"cut")
    assert find_model_path(tmp_path, "actor") == whole


@pytest.mark.parametrize("inside", [".", "huggingface"])
def test_stale_weights_are_never_preferred_to_newer_shards(
    tmp_path: Path, commit: Commit, inside: str
) -> None:
    before = commit(3)
    folder = commit(5)
    write(folder / inside / "model.safetensors", NOW - 60)
    assert find_model_path(tmp_path, "actor") == before
    os.utime(folder / inside / "model.safetensors", (NOW + 60, NOW + 60))
    assert find_model_path(tmp_path, "actor") == folder  # an export of these shards


def test_the_hugging_face_folder_is_that_of_a_commit_that_put_weights_there(
    tmp_path: Path, commit: Commit
) -> None:
    exported = commit(3, "actor/huggingface/model.safetensors")
    commit(5, "actor/huggingface/config.json")
    assert find_model_path(tmp_path, "actor", use_huggingface=True) == exported / "huggingface"


def test_weights_count_without_the_optimizer_next_to_them(tmp_path: Path) -> None:
    commit_step(tmp_path, 2)
    folder = step_folder(tmp_path, 1) / "actor"
    (folder / shard_file("optim", 2, 1)).unlink()
    found = find_committed_version(tmp_path, "actor")
    assert found is not None
    asked: list[str] = []
    opener = VersionOpener("reader")
    with (
        watch_path_calls(lambda kind, path: asked.append(path), tmp_path),
        opener.open_checkpoint(found) as view,
    ):
        assert view.version == found
    assert not [path for path in asked if path.startswith(f"{folder}/optim")]
    (folder / shard_file("model", 2, 1)).write_bytes(b"")
    assert find_committed_version(tmp_path, "actor") is None
    with pytest.raises(VersionUnavailableError, match="has 0 bytes"), opener.open_checkpoint(found):
        pass
