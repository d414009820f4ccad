"""A memory limit that counts shared memory is seen before the kernel ends the process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_sync.fs import memory
from trinity_sync.fs.memory import find_room, measure_ray_stores
from trinity_sync.snapshot.spool import JobSpool

LIMIT = 1 << 30

LIMITED = """
import os, sys
from pathlib import Path

group, folder = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
from trinity_sync.errors import SpoolFullError
from trinity_sync.snapshot.slot import allocate_slot
from trinity_sync.snapshot.spool import JobSpool

spool = JobSpool(folder)
for what in (lambda size: spool.require_room(size), lambda size: allocate_slot(fd, path, size)):
    path = folder / "a.slot"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        what(2 << 30)
    except SpoolFullError as error:
        print(error)
    what(1 << 20)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below that of this process, with a limit."""
    for kind, _, own in memory._list_groups():
        try:
            (made := own / "trinity_sync-test").mkdir(exist_ok=True)
            (made / memory._FILES[kind][0]).write_text(str(LIMIT))
        except OSError:
            continue
        yield made
        made.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def test_what_a_memory_limit_leaves_is_the_room(group: Path, spool_folder: Path) -> None:
    (folder := spool_folder / "job").mkdir(mode=0o700)
    command = [sys.executable, "-c", LIMITED, str(group), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    required, allocated = done.stdout.splitlines()
    assert f"The memory limit of {group} counts shared memory: raise it" in required
    assert f"The memory limit of {group} counts shared memory: raise it" in allocated


RAYLET = """
import os, sys, tempfile
open("/proc/self/comm", "w").write("raylet")
store = tempfile.TemporaryFile(dir=sys.argv[1])
os.ftruncate(store.fileno(), 1 << 40)
print(flush=True)
sys.stdin.read()
"""


def test_what_the_store_of_a_ray_node_may_still_take_is_told_before_a_training(
    spool_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = JobSpool(spool_folder / "job")
    command = [sys.executable, "-c", RAYLET, str(spool_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout
        assert raylet.stdout.readline()
        assert measure_ray_stores(spool_folder) >= 1 << 40
        spool.require_room(1 << 20)
    assert "need 1,048,576 bytes in spool" in caplog.text
    assert "of which Ray's object store may take 1," in caplog.text
    assert "--shm-size" in caplog.text


def test_without_a_limit_the_room_is_that_of_the_file_system(spool_folder: Path) -> None:
    room = find_room(spool_folder)
    assert 0 < room.nbytes <= 1 << 62
    assert "--shm-size" in room.enlarge


def test_the_groups_of_a_container_are_below_its_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    (tmp_path / "cgroup").write_text("4:cpu,memory:/docker/abc\n1:name=systemd:/x\n0::/unified\n")
    (tmp_path / "mountinfo").write_text(
        "30 23 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "31 23 0:27 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
        "32 23 0:28 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n"
    )
    assert [(kind, str(folder)) for kind, _, folder in memory._list_groups()] == [
        ("cgroup", "/sys/fs/cgroup/memory"),
        ("cgroup2", "/sys/fs/cgroup/unified/unified"),
    ]
