"""What a root can do is found out when a job begins: refused, or done another way."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.job import Job
from tests.support.restricted import restricted
from trinity_sync.client import init_root
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.init_root import probe_capabilities, require_capabilities
from trinity_sync.errors import ConfigError, RootError
from trinity_sync.fs.file_system import CLOCKS_DIFFER_S, find_mount, is_recent
from trinity_sync.layout import split_role_path
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage.block_reuse import can_reuse_blocks
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run

MOUNTS = r"""
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:40 / /data rw - nfs4 server:/data rw,vers=4.2,local_lock=none
31 30 0:41 / /data/two\040words rw - nfs server:/old rw,vers=3,nocto,nolock,local_lock=all
32 21 0:42 / /lustre rw - lustre mgs:/fs rw,localflock
33 21 0:43 / /over rw - tmpfs tmpfs rw
34 21 0:44 / /over rw - fuse.s3fs s3fs rw
35 21 0:45 / /bucket rw - fuse mountpoint-s3 rw
36 21 0:46 / /juice rw - fuse.juicefs JuiceFS:fs rw
37 21 0:47 / /nameless rw - tmpfs  rw,size=4m
38 21 0:48 / /wsl rw - 9p C:\134Program\040Files rw,aname=drvfs;path=C:\Program Files\Docker;uid=0
""".strip()


def test_a_node_whose_clock_is_a_day_ahead_removes_no_probe_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = tmp_path / ".meeting.1.tmp"
    meeting.touch()
    later = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    probe_capabilities(tmp_path)
    assert meeting.exists()


def test_a_root_that_cannot_be_written_is_refused_with_its_file_system() -> None:
    with pytest.raises(RootError, match=r"/proc \(proc, mounted at /proc\) cannot be written"):
        require_capabilities(Path("/proc"))


def test_a_full_disk_is_refused_with_the_way_out(small_disk: Path) -> None:
    (small_disk / "all of it").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(RootError, match=r"cannot be written: No space left .* Free space there"):
        require_capabilities(small_disk)


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        ("rename", "atomic rename of a folder"),
        ("copy", "atomic rename of a file"),
        ("flock", "locks between processes"),
        ("range", "locks between processes"),
        ("fsyncdir", "sync to disk"),
    ],
)
def test_a_file_system_that_lacks_what_a_commit_needs_is_refused_at_the_start(
    tmp_path: Path, spool_folder: Path, refused: str, named: str
) -> None:
    with restricted(tmp_path, refused) as mount:
        settings = Settings(spool=spool_folder)
        with pytest.raises(RootError, match=rf"\(fuse.*has no {named} .*set a remote"):
            CheckpointCoordinator(mount / "ckpts", settings=settings)
        assert list((mount / "ckpts").iterdir()) == []


def test_the_mount_of_an_object_store_is_refused_though_its_renames_look_atomic(
    tmp_path: Path,
) -> None:
    with (
        restricted(tmp_path, called="s3fs") as mount,
        pytest.raises(RootError, match=r"fuse\.s3fs copies the files .*set a remote"),
    ):
        require_capabilities(mount)


def test_what_only_makes_it_faster_is_done_another_way(tmp_path: Path, spool_folder: Path) -> None:
    with restricted(tmp_path, "link", "direct") as mount:
        require_capabilities(mount)
        assert not can_reuse_blocks(mount, True)
        job = Job.open(mount, spool_folder)
        for run in (1, 2):  # the second takes the place of the first one's step
            open_run(mount, f"run {run}", 0)
            job.commit_states(4, {"model": {"w": torch.full((5000,), float(run))}}, run=run)
        assert open_run(mount, "run 2", 0).number == 2
        assert load_states(mount, 4, "actor")["model"]["w"][0] == 2
        job.close()


@pytest.mark.parametrize(
    ("path", "kind", "is_object_store", "local_lock", "weak_consistency"),
    [
        ("/home", "ext4", False, "", ""),
        ("/data/ckpts", "nfs4", False, "", ""),
        ("/data/two words/ckpts", "nfs", False, "nolock", "nocto"),
        ("/lustre", "lustre", False, "localflock", ""),
        ("/over/it", "fuse.s3fs", True, "", ""),
        ("/bucket", "fuse", True, "", ""),
        ("/wsl/ckpts", "9p", False, "", ""),
        ("/juice", "fuse.juicefs", False, "", ""),
        ("/nameless", "tmpfs", False, "", ""),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_the_last_and_known_by_type_and_options(
    path: str, kind: str, is_object_store: bool, local_lock: str, weak_consistency: str
) -> None:
    mount = find_mount(path, MOUNTS)
    assert (mount.kind, mount.is_object_store) == (kind, is_object_store)
    assert (mount.local_lock_option, mount.weak_consistency_option) == (
        *(local_lock, weak_consistency),
    )
    assert find_mount(path, "").kind == "unknown"


def test_files_are_recycled_where_other_nodes_cannot_read_them_or_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_reuse_blocks(tmp_path, True) is not find_mount(tmp_path).shared
    assert not can_reuse_blocks(tmp_path, False)
    assert can_reuse_blocks("/proc", "always")
    assert not can_reuse_blocks("/proc", True)
    monkeypatch.setenv("TRINITY_SYNC_STACK__IO__REUSE_FILES", "always")
    assert StackSettings().io.reuse_files == "always"
    monkeypatch.setenv("TRINITY_SYNC_STACK__IO__REUSE_FILES", "false")
    assert StackSettings().io.reuse_files is False


@pytest.mark.parametrize("root", ["s3://bucket/job", Path("s3://bucket/job"), "gs://bucket"])
def test_a_url_is_no_root_and_no_folder_is_made_of_it(
    root: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"jobs set ROOT remote=(s3|gs)://bucket"):
        CheckpointCoordinator(root)
    with pytest.raises(ConfigError, match="jobs set ROOT remote="):
        split_role_path(f"{root}/global_step_4/actor")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ago_s", "recent"),
    [(-CLOCKS_DIFFER_S, False), (1 - CLOCKS_DIFFER_S, True), (59, True), (60, False)],
)
def test_a_time_is_recent_also_by_a_clock_that_is_a_little_ahead(
    ago_s: float, recent: bool
) -> None:
    assert is_recent(1e9 - ago_s, 1e9, 60) is recent


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_a_killed_probe_has_left_is_removed_unless_it_is_new(
    root: Path, make: Callable[[Path], None]
) -> None:
    left = [root / f".{name}.{'0' * 32}.tmp" for name in ("probe", "meeting", "doctor")]
    for path, at in zip(left, (1e9, 9e9, None), strict=True):  # 9e9 is of a clock that was set back
        make(path)
        os.utime(path, at and (at, at))
    probe_capabilities(root)
    assert [path for path in left if path.exists()] == left[2:]


def test_a_probe_whose_folder_becomes_a_link_writes_nothing_where_that_leads(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private := tmp_path / "private").mkdir()

    def attempt(folder: Path) -> None:
        (probe,) = root.glob(".probe.*")
        assert not probe.stat().st_mode & 0o077
        probe.rename(root / "moved").parent.joinpath(probe.name).symlink_to(private)
        (folder / "file").write_bytes(b"x")

    monkeypatch.setattr(init_root, "_ATTEMPTS", [("it", attempt, "")])
    assert [each.reason for each in probe_capabilities(root).each] == [""]
    assert not [*private.iterdir()]
    assert (root / "moved/attempt/file").read_bytes() == b"x"
