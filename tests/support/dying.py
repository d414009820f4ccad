"""Work of forked children: as another user, or up to a death right before a change on disk.

And what the kernel refuses to a program, as it does in a container.
"""

import ctypes
import json
import os
import platform
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

ANOTHER_USER = 12345
"""The number of a user, and of a group, that is no other's."""
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
"""Audit events of what a crash can fall between."""


NUMBERS = {
    "flock": (73, 32),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "getpriority": (140, 141),
    "link": (86, 37),
    "madvise": (28, 233),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "write": (1, 64),
}
"""Numbers of system calls on x86_64 and on aarch64."""


def refuse_calls(error: int, *names: str) -> None:
    """Have the kernel refuse system calls to this thread, and to all that it starts (seccomp).

    Without an error they do nothing, and return 0.
    """
    machines = {"x86_64": 0, "aarch64": 1}
    assert platform.machine() in machines, "add its numbers"
    which = machines[platform.machine()]
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    lines = [struct.pack("HBBI", load, 0, 0, 0)]  # the number of the call
    for name in names:
        lines.append(struct.pack("HBBI", jump_if_equal, 0, 1, NUMBERS[name][which]))
        lines.append(struct.pack("HBBI", answer, 0, 0, 0x50000 | error))
    lines.append(struct.pack("HBBI", answer, 0, 0, 0x7FFF0000))  # allow it
    code = ctypes.create_string_buffer(b"".join(lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option in ((38, 1, 0, 0, 0), (22, 2, program)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(*option):
            raise OSError(ctypes.get_errno(), "prctl")


def end_of(body: Callable[[], object]) -> int:
    """How a forked child ends that does ``body``: its exit code, or the signal, negative."""
    child = os.fork()
    if not child:
        code = 1
        try:
            body()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def as_another_user(body: Callable[[], object], *groups: int, gid: int = ANOTHER_USER) -> None:
    """Call ``body`` in a child that is another user."""
    if os.getuid():
        pytest.skip("only root can be another user")

    def become_another() -> None:
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(ANOTHER_USER)
        body()

    assert end_of(become_another) == 0


def in_a_process(body: Callable[[], object], notes: Path, *, die_before: int | None = None) -> int:
    """Run ``body`` in a child that dies before it changes names for that many-th time.

    Args:
        body: does not return anything that is needed.
        notes: a folder elsewhere.
        die_before: 1 for the first change; None lets the child live.

    Returns:
        How often it changed names; ``die_before`` if it died.
    """
    counted = notes / "changes"
    counted.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: object) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if seen == die_before:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            body()
            counted.write_text(json.dumps(seen))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return die_before
    return int(counted.read_text())
