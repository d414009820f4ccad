"""Records that several threads of a new process read for the first time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.fs import atomic
from trinity_sync.fs.atomic import read_file

THREADS_READ_NEW_TYPES = """
import sys
import threading
from dataclasses import make_dataclass
from typing import Literal

from trinity_sync.fs.records import Count, Record, Seconds, decode_record, encode_record

sys.setswitchinterval(1e-6)


def read(kind, content):
    start.wait()
    found.append(decode_record(kind, content, ""))


for number in range(400):
    inner = make_dataclass("Inner", [("nbytes", Count), ("shared", dict[str, str])], frozen=True)
    fields = [
        ("inner", inner),
        ("components", tuple[str, ...]),
        ("form", Literal["file", f"folder {number}"]),
        ("sealed_at", Seconds),
        ("stall_s", Seconds),
    ]
    kind = make_dataclass("Outer", fields, bases=(Record,), frozen=True)
    record = kind(inner(number, {"model": "a"}), ("model", "optim"), "file", 1.0, 2.0)
    content = encode_record(record).encode()
    start, found = threading.Barrier(4), []
    threads = [threading.Thread(target=read, args=(kind, content)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [record] * 4, (number, found)
"""


def test_threads_that_read_the_first_record_of_a_type_do_not_crash_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", THREADS_READ_NEW_TYPES], capture_output=True, text=True, timeout=250
    )
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr}"


@pytest.mark.parametrize("times", [50, 1000], ids=["for half a second", "for ever"])
def test_a_record_that_is_replaced_on_nfs_while_it_is_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """``make nfs`` meets it on a real one."""
    path, real, stale = tmp_path / "record", os.fstat, [OSError(errno.ESTALE, "stale")] * times
    path.write_bytes(b"new")

    def fstat(fd: int) -> os.stat_result:
        if stale and Path(f"/proc/self/fd/{fd}").resolve() == path:
            raise stale.pop()
        return real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        if times == 50:
            assert read_file(path) == b"new"
        else:
            patch.setattr(atomic, "STALE_S", 0.1)
            with pytest.raises(OSError, match="stale"):
                read_file(path)
    assert path not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
