"""Records that several threads of a new process read for the first time."""

import subprocess
import sys

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
        [sys.executable, "-c", THREADS_READ_NEW_TYPES], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr}"
