"""Daemons and their ports: what does not get ready is reported, what is stopped has ended."""

import errno
import math
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.support.disk import no_file_above
from tests.support.waiting import until
from trinity_sync.errors import StackError
from trinity_sync.fs.process import is_process_alive, lower_session_priority, read_process_identity
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack import daemon, local_stack, services
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState

RAY = """
print("Local node IP: 127.0.0.1")
print("\\x1b[31mException: The current node timed out during startup.\\x1b[39m")
print("--------------------------")
"""


def start(code: str, folder: Path) -> Daemon:
    return daemon.start([sys.executable, "-c", code], env={}, cwd=folder, log=folder / "one.log")


def test_a_daemon_that_ends_is_reported_with_the_telling_line_of_this_start(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("Exception: of an earlier start\n")
    with pytest.raises(StackError) as caught:
        daemon.await_ready("the Ray node", start(RAY, tmp_path), lambda: False, 60)
    said = str(caught.value)
    assert said.startswith(
        "the Ray node ended while it started: Exception: The current node timed out during startup."
    )
    assert str(tmp_path / "one.log") in said
    with pytest.raises(StackError, match=r"ended while it started\. Its log"):
        daemon.await_ready("the server", start("", tmp_path), lambda: False, math.inf)


BUSY = """
import os, pathlib, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while not pathlib.Path("go").exists():
    time.sleep(0.01)
while time.process_time() < float(sys.argv[2]):
    pass
pathlib.Path(sys.argv[1] + " ended").touch()
time.sleep(60)
"""


def test_a_daemon_that_gets_no_cpu_is_waited_for_longer(tmp_path: Path) -> None:
    def begin(name: str, cpu_s: str) -> Daemon:
        command = [sys.executable, "-c", BUSY, name, cpu_s]
        return daemon.start(command, env={}, cwd=tmp_path, log=tmp_path / f"{name}.log")

    others = begin("others", "60")
    starved = begin("starved", "0.4")
    daemon.lower_priority(starved, 10)
    (tmp_path / "go").touch()
    try:
        daemon.await_ready("it", starved, (tmp_path / "starved ended").exists, 1)
        assert daemon._read_cpu_wait(starved) > 1
    finally:
        daemon.stop(others, 5)
        daemon.stop(starved, 5)


def test_a_daemon_that_hangs_or_is_late_is_known_and_ends_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "SILENT_S", 0.1)
    hangs = start("import time; time.sleep(60)", tmp_path)
    os.kill(hangs.pid, signal.SIGSTOP)
    assert daemon.check("it", hangs, lambda: True) == "running"
    assert daemon.check("it", hangs, lambda: False) == "unresponsive"
    began = time.monotonic()
    daemon.stop(hangs, 60)
    assert time.monotonic() - began < 30
    assert daemon.check("it", hangs, lambda: True) == "dead"
    sleeper = start("import time; time.sleep(60)", tmp_path)
    try:
        with pytest.raises(StackError, match=r"the Ray node was not ready within 0 s\. Its log /"):
            daemon.await_ready("the Ray node", sleeper, lambda: False, 0)
    finally:
        daemon.stop(sleeper, 5)


NAMED = r"""
import ctypes, pathlib, sys
ctypes.CDLL(None).prctl(15, b"ray) S 1 (\xe5\x8f\x82\xe6\x95\xb0")  # PR_SET_NAME
pathlib.Path("named").touch()
sys.stdin.read()
"""


def test_a_ray_node_whose_raylet_has_ended_does_not_answer(tmp_path: Path) -> None:
    """`ray start` lives on: a raylet whose agent was killed ends as if it had been told to."""
    for name in ("gcs_server", "raylet"):
        shutil.copy("/bin/sleep", tmp_path / name)
    for name in ("logs", "sockets"):
        (tmp_path / "ray/session_latest" / name).mkdir(parents=True)
    run = "import subprocess; [each.wait() for each in [subprocess.Popen([f'./{name}', '60']) "
    ray = start(run + "for name in ('raylet', 'gcs_server')]]", tmp_path)  # which reaps it at once
    state = StackState(ray=ray, ray_folder=str(tmp_path))
    until(lambda: services.answers(state, "ray"), "both parts run")
    (raylet,) = [each for each in daemon.find_family(ray) if each.name() == "raylet"]
    raylet.kill()
    raylet.wait(250)
    assert not services.answers(state, "ray")
    daemon.stop(ray, 10)


def test_a_worker_has_no_heartbeat_by_the_time_of_a_clock_that_was_set_back(tmp_path: Path) -> None:
    state = StackState(worker=Daemon("1/0", str(tmp_path / "worker.log")))
    Path(state.worker.log).touch()
    assert services.answers(state, "worker")
    os.utime(state.worker.log, (9e9, 9e9))
    assert not services.answers(state, "worker")


@pytest.fixture
def named(tmp_path: Path) -> Iterator[int]:
    """A process whose name the kernel has cut within a character, after 15 bytes."""
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        while not (tmp_path / "named").exists():
            assert process.poll() is None
        yield process.pid
        process.communicate()


def test_a_process_is_known_and_left_alone_whatever_bytes_it_has_for_a_name(
    named: int, tmp_path: Path
) -> None:
    assert Path(f"/proc/{named}/comm").read_bytes() == b"ray) S 1 (\xe5\x8f\x82\xe6\x95\n"
    assert psutil.Process(named).ppid() == os.getpid()
    began = Path(f"/proc/{named}/stat").read_text(errors="ignore").split()[-31]
    assert read_process_identity(named) == f"{named}/{began}"
    assert is_process_alive(read_process_identity(named))
    sleeper = start("import time; time.sleep(60)", tmp_path)
    daemon.stop(sleeper, 5)
    assert not sleeper.lives
    assert is_process_alive(read_process_identity(named))


@pytest.mark.parametrize("name", ["0/5", "-1/5", f"{1 << 40}/5", "five/5", ""])
def test_a_name_that_no_process_can_have_is_of_none_that_lives(name: str) -> None:
    assert not is_process_alive(name)


IDENTITY = """
import os
from pathlib import Path
from trinity_sync.fs.process import read_process_identity, read_process_namespace
assert not Path("/proc/stat").exists()  # with the time of the boot, which changes with the clock
began = Path("/proc/self/stat").read_text().split()[21]
assert read_process_identity(os.getpid()) == f"{os.getpid()}/{began}"
assert read_process_namespace() == f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}"
"""


def test_a_process_has_an_identity_where_the_kernel_tells_of_processes_alone() -> None:
    in_namespace("subset=pid", IDENTITY)


HIDDEN = """
import ctypes, os, subprocess, sys
from pathlib import Path
from trinity_sync.stack import daemon
from trinity_sync.fs.process import is_process_alive, read_process_identity
theirs = read_process_identity(subprocess.Popen(["sleep", "60"]).pid)
os.setgroups([])  # that of root may see all
os.setgid(12345)
os.setuid(12345)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: its own are not hidden, as of who logs in
ours = daemon.start(["sleep", "60"], env=os.environ, cwd=Path("/"), log=Path(sys.argv[1]))
assert is_process_alive(theirs) and is_process_alive(ours.process)
daemon.stop(ours, 5)
assert is_process_alive(theirs) and not is_process_alive(ours.process)
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_processes_of_others_that_the_kernel_hides_stop_no_daemon(hidepid: int) -> None:
    with TemporaryDirectory() as folder:  # tmp_path is for no other user
        os.chown(folder, 12345, 12345)
        in_namespace(f"hidepid={hidepid}", HIDDEN, f"{folder}/log/log")


def in_namespace(how: str, *program: str) -> None:
    """Run a program where ``/proc`` is mounted with an option."""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if os.getuid() or subprocess.run([*isolated, "true"], check=False).returncode:
        pytest.skip("only root can mount /proc")
    mount = f'mount -t proc -o {how} proc /proc && exec "$0" -c "$@"'
    subprocess.run(
        [*isolated, "sh", "-c", mount, sys.executable, *program], check=True, timeout=250
    )


def test_what_was_started_and_cannot_be_written_down_is_stopped(tmp_path: Path) -> None:
    server = start("import time; time.sleep(60)", tmp_path)
    settings, started = Settings(home=tmp_path), StackState("http://127.0.0.1:9/api", server=server)
    with pytest.raises(OSError, match="too large"), no_file_above(100):
        local_stack._start(lambda *_: started, settings, StackSettings(), StackState())
    assert not server.lives
    assert local_stack.read_state(settings.home) is None


@pytest.mark.parametrize("until", ["it runs", "it is a zombie", "it is gone"])
def test_a_daemon_that_is_just_being_reaped_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    """Linux 6.18 answers ENOENT for a process between its two ends, and ESRCH afterwards."""
    open_real, asked = os.pidfd_open, []

    def open_late(pid: int, flags: int = 0) -> int:
        asked.append(pid)
        if len(asked) == 1:
            if until != "it runs":  # where psutil makes another error of it
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if until == "it is gone":
                os.waitpid(pid, 0)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return open_real(pid, flags)

    sleeping = start("import time; time.sleep(60)", tmp_path)
    monkeypatch.setattr(os, "pidfd_open", open_late)
    daemon.stop(sleeping, 10)
    assert len(asked) > 1
    assert not sleeping.lives


def test_clients_of_plain_http_load_one_certificate_that_no_cleaner_of_the_home_removes(
    tmp_path: Path,
) -> None:
    settings, state = Settings(home=tmp_path), StackState(api_url="http://127.0.0.1:9/api")
    env = services.build_environment(settings, StackSettings(), state)
    named = env["PREFECT_API_SSL_CERT_FILE"]
    assert len(ssl.create_default_context(cafile=named).get_ca_certs()) == 1
    assert not Path(named).is_relative_to(tmp_path)


WITH_CHILD = """
import os, pathlib, subprocess, threading
thread = threading.Thread(target=subprocess.run, args=(["sleep", "60"],))
thread.start()
pathlib.Path("thread").write_text(str(thread.native_id))
"""


def test_a_daemon_and_its_session_yield_to_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    command = [sys.executable, "-c", WITH_CHILD]
    started = daemon.start(command, env=dict(os.environ), cwd=tmp_path, log=tmp_path / "logs/log")
    leader = psutil.Process(started.pid)
    try:
        daemon.await_ready("it", started, lambda: bool(leader.children()), 60)
        assert caplog.messages == ["it is ready"]
        daemon.lower_priority(started, 19)
        threads = [int((tmp_path / "thread").read_text()), started.pid, leader.children()[0].pid]
        assert [os.getpriority(os.PRIO_PROCESS, each) for each in threads] == [19] * 3
        group = Path(f"/proc/{started.pid}/autogroup")
        if group.exists() and (told := group.read_text()):  # otherwise that of the process counts
            assert told.split()[-1] == "19"
    finally:
        daemon.stop(started, 5)
    daemon.lower_priority(started, 19)  # it has ended, and is left alone


def test_a_process_without_a_group_of_its_session_keeps_its_priority() -> None:
    """The kernel refuses the change of a process that was started in no session."""
    group = Path("/proc/2/autogroup")  # of the parent of the kernel's threads
    if not group.exists() or group.read_text():
        pytest.skip("the kernel's threads are not seen here")
    lower_session_priority(2, 19)


def test_looks_at_a_server_that_starts_leave_it_the_cpu() -> None:
    state = StackState(api_url=f"http://127.0.0.1:{daemon.free_port()}/api")
    began = time.process_time()
    assert not any(services.is_server_ready(state) for _ in range(20))
    assert time.process_time() - began < 0.2  # with authorities for TLS, 0.7 s


def test_a_port_is_free_not_one_of_outgoing_connections_and_not_always_the_same() -> None:
    assert 1024 <= daemon.free_port() < int(daemon.RANGE.read_text().split()[0])
    found = set()
    for _ in range(20):
        random.seed(0)
        found.add(daemon.free_port())
    assert len(found) > 1


def test_the_port_of_an_earlier_server_or_one_that_is_wanted_is_taken_unless_it_is_not_free() -> (
    None
):
    port = daemon.free_port()
    url = f"http://127.0.0.1:{port}/api"
    assert daemon.free_port(url) == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert daemon.free_port(url) != port
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        found = daemon.free_port(first=taken)
        assert taken < found < taken + daemon.FOLLOWING
        assert daemon.free_port(f"http://127.0.0.1:{found}/api", first=taken) == found
    assert daemon.free_port(first=taken) == taken
    elsewhere = f"http://127.0.0.1:{taken + 2 * daemon.FOLLOWING}/api"
    assert daemon.free_port(elsewhere, first=taken) == taken


def test_where_all_ports_are_for_outgoing_connections_it_is_one_of_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tmp_path / "ip_local_port_range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr(daemon, "RANGE", everything)
    assert daemon.free_port() >= 1024


def test_where_no_port_is_free_it_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(daemon, "_candidates", lambda *_: [other.getsockname()[1]])
        with pytest.raises(StackError, match=r"no port of 127\.0\.0\.1 is free .* end some"):
            daemon.free_port()
