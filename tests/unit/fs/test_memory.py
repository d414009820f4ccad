"""A memory limit that counts shared memory is seen before the kernel ends the process."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.conftest import set_limit
from trinity_sync.fs import file_system as memory
from trinity_sync.fs.file_system import find_shortage, measure_ray_stores
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
for what in (spool.require_room, lambda size: allocate_slot(fd, path, size, bool)):
    path = folder / "a.slot"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        what(2 << 30)
    except SpoolFullError as error:
        print(error)
    what(1 << 20)
"""


def test_what_a_memory_limit_leaves_is_the_room(group: Path, spool_folder: Path) -> None:
    set_limit(group, LIMIT)
    (folder := spool_folder / "job").mkdir(mode=0o700)
    command = [sys.executable, "-c", LIMITED, str(group), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    required, allocated = done.stdout.splitlines()
    assert f"The memory limit of {group} counts shared memory: raise it" in required
    assert f"The memory limit of {group} counts shared memory: raise it" in allocated


RAYLET = """
import os, sys, tempfile
open("/proc/self/comm", "wb").write(bytes.fromhex(sys.argv[2]))
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
    names = (b"raylet", "ray 参数参数".encode()[:15])  # the kernel cuts names after 15 bytes
    with ExitStack() as stack:
        for name in names:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            running = stack.enter_context(subprocess.Popen([*command, name.hex()], **pipes))
            assert running.stdout.readline()
        assert measure_ray_stores(spool_folder) >= 1 << 40
        spool.require_room(1 << 20)
    assert "need 1,048,576 bytes in spool" in caplog.text
    assert "of which Ray's object store may take 1," in caplog.text
    assert "--shm-size" in caplog.text


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


def test_memory_that_the_host_lacks_is_a_shortage_where_no_group_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {64 << 20} kB\nMemAvailable: {3 << 20} kB\nHugePages_Total: 0\n"
    )
    monkeypatch.setattr(memory, "_PROC", tmp_path / "self")
    assert find_shortage(2 << 30) == ""  # a GiB is not for images
    assert find_shortage((2 << 30) + 1) == "the host's memory is nearly used up"


UNIFIED = """\
40 23 0:40 / {point} rw - cgroup2 cgroup2 rw
"""


def test_a_limit_of_version_2_that_is_near_and_what_waits_for_memory_are_shortages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "self").mkdir()
    (group := tmp_path / "unified" / "job" / "step").mkdir(parents=True)
    monkeypatch.setattr(memory, "_PROC", own)
    (own / "cgroup").write_text("0::/job/step\n")
    (own / "mountinfo").write_text(UNIFIED.format(point=tmp_path / "unified"))
    (group / "memory.max").write_text("max\n")
    limited = group.parent
    (limited / "memory.max").write_text(f"{32 << 30}\n")
    (limited / "memory.current").write_text(f"{28 << 30}\n")
    (limited / "memory.stat").write_text(f"anon 9\ninactive_file {1 << 30}\nactive_file 0\n")
    stalls = "some avg10=70.00 avg60=9.00 avg300=1.00 total=9\nfull avg10={} avg60=0.00 total=9\n"
    (limited / "memory.pressure").write_text(stalls.format("9.99"))
    assert find_shortage() == find_shortage(4 << 30) == ""  # a GiB is not for images
    assert find_shortage((4 << 30) + 1) == f"the memory limit of {limited} is near"
    (limited / "memory.pressure").write_text(stalls.format("10.00"))
    assert "processes wait for memory" in find_shortage()
    (limited / "memory.pressure").write_text(stalls.format("0.00"))
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(stalls.format("85.31"))
    assert "avg10=85.31" in find_shortage()
