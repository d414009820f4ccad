"""The writer: same bytes, right digest, direct I/O where it can be had, within a speed limit."""

import mmap
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import xxhash

from tests.support.disk import no_file_above
from tests.support.dying import end_of, refuse_calls
from trinity_sync.fs.direct_io import (
    CHUNK,
    IN_FLIGHT,
    PIECE,
    READERS,
    RateLimit,
    digest_cached_file,
    digest_file,
    open_to_read,
    read_fd,
    scatter_fd,
    write_file,
)
from trinity_sync.fs.process import lower_thread_priority


def mapped(content: bytes) -> memoryview:
    """The content at a page boundary of memory, as in a slot."""
    memory = mmap.mmap(-1, max(len(content), 1))
    memory[: len(content)] = content
    return memoryview(memory)[: len(content)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "size",
    [0, 1, 4095, 4096, 4097, CHUNK, CHUNK + 1, 2 * CHUNK + 4096, (IN_FLIGHT + 1) * CHUNK + 4097],
)
def test_every_size_is_written_whole(tmp_path: Path, size: int, direct: bool) -> None:
    content = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    digest = write_file(path, mapped(content), direct=direct)
    assert path.read_bytes() == content
    assert digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    assert digest_cached_file(path) == digest


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4095, 4096, 4097, PIECE, PIECE + 1, READERS * 3 * PIECE + 4097]
)
def test_every_size_is_read_whole_and_has_the_same_digest_in_pieces(
    tmp_path: Path, nbytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(nbytes).randbytes(nbytes))
    with open_to_read(path) as fd:
        content, digest = read_fd(fd, nbytes)
    assert bytes(content) == path.read_bytes()
    assert digest == digest_file(path, nbytes) == digest_cached_file(path)


@pytest.mark.parametrize("content", ["zeros", "one piece, repeated"])
def test_a_file_that_was_cut_off_has_not_the_digest_of_the_whole(
    tmp_path: Path, content: str
) -> None:
    path, nbytes = tmp_path / "file", PIECE * READERS * 4
    piece = bytes(PIECE) if content == "zeros" else random.Random(1).randbytes(PIECE)
    path.write_bytes(piece * READERS * 4)
    whole = digest_file(path, nbytes)
    os.truncate(path, nbytes - PIECE)
    with open_to_read(path) as fd:
        assert whole not in (digest_file(path, nbytes), read_fd(fd, nbytes)[1])


def test_a_file_that_cannot_be_opened_for_direct_io_is_read_all_the_same() -> None:
    with open_to_read(Path("/proc/version")) as fd:
        assert os.read(fd, 5) == b"Linux"


def test_memory_that_direct_io_refuses_is_written_all_the_same(tmp_path: Path) -> None:
    content = mapped(bytes(range(256)) * 100)[1:]
    write_file(tmp_path / "file", content, direct=True)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_grows_too_large_is_an_error_and_nothing_is_written_after_it(
    tmp_path: Path, direct: bool
) -> None:
    content = mapped(bytes((IN_FLIGHT + 2) * CHUNK))
    with pytest.raises(OSError, match="File too large"), no_file_above(2 * CHUNK):
        write_file(tmp_path / "file", content, direct=direct)
    assert not [thread for thread in threading.enumerate() if "writer" in thread.name]


@pytest.mark.parametrize("ranks", [1, 1000])
@pytest.mark.parametrize("part", [700, 3 << 20])
@pytest.mark.parametrize("lacking", [0, 5 << 19])
def test_a_file_is_read_to_many_places_and_digested_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, part: int, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    size = (20 << 20) + 17
    content = random.Random(part).randbytes(size - lacking)
    (tmp_path / "file").write_bytes(content)
    memory = memoryview(bytearray(size))

    def places(at: int, nbytes: int) -> list[memoryview]:
        return [memory[i : min(i + part, at + nbytes)] for i in range(at, at + nbytes, part)]

    with open_to_read(tmp_path / "file", direct=False) as fd:
        digest = scatter_fd(fd, size, places)
    assert memory == content + bytes(lacking)
    assert digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


@pytest.mark.parametrize("ranks", [1, 1000])
def test_an_error_in_one_place_ends_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    (tmp_path / "file").write_bytes(bytes(30 << 20))

    def places(at: int, nbytes: int) -> list[memoryview]:
        if at >= 5 << 20:
            raise OSError("this memory is gone")
        return [memoryview(bytearray(nbytes))]

    with (
        open_to_read(tmp_path / "file", direct=False) as fd,
        pytest.raises(OSError, match="memory is gone"),
    ):
        scatter_fd(fd, 30 << 20, places)


def test_every_chunk_waits_for_the_limit(tmp_path: Path) -> None:
    waits: list[float] = []
    limit = RateLimit(tmp_path / "rate", CHUNK, clock=lambda: 0.0, sleep=waits.append)
    write_file(tmp_path / "file", mapped(bytes(3 * CHUNK)), limit=limit)
    assert waits == [0.0, 1.0, 2.0]


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link"):
        write_file(tmp_path / "link", mapped(b"x"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    def write() -> None:
        refuse_calls(0, "pwrite64")
        with pytest.raises(OSError, match="writes nothing"):
            write_file(tmp_path / "file", mapped(bytes(10_000)))

    assert end_of(write) == 0


@pytest.mark.parametrize(("nice", "then"), [(5, 5), (19, 19), (1, 3), (0, 3)])
def test_a_thread_that_yields_more_already_keeps_to_it_without_a_privilege(
    nice: int, then: int
) -> None:
    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)
        lower_thread_priority(nice)
        sys.exit(os.getpriority(os.PRIO_PROCESS, 0))

    assert end_of(lower) == then


class Clock:
    """A clock that only sleeping moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_two_writers_share_one_limit(tmp_path: Path) -> None:
    clock = Clock()
    writers = [RateLimit(tmp_path / "rate", 1e6, clock=clock, sleep=clock.sleep) for _ in "ab"]
    for number in range(11):
        writers[number % 2].admit(1_000_000)
    assert clock.now == 110.0  # the first bytes do not wait


def test_idle_time_is_not_saved_up(tmp_path: Path) -> None:
    clock = Clock()
    limit = RateLimit(tmp_path / "rate", 1e6, clock=clock, sleep=clock.sleep)
    limit.admit(1_000_000)
    clock.now += 50
    for _ in range(3):
        limit.admit(1_000_000)
    assert clock.now == 152.0


def test_a_writer_that_is_stopped_while_it_waits_stops_no_other(tmp_path: Path) -> None:
    waits, resumes, ends = threading.Event(), threading.Event(), list[bool]()

    def stop(_: float) -> None:
        waits.set()
        ends.append(resumes.wait(250))

    clock = Clock()
    limit = RateLimit(tmp_path / "rate", 1e6, clock=clock, sleep=clock.sleep)
    limit.admit(1_000_000)
    stopped = RateLimit(tmp_path / "rate", 1e6, clock=clock, sleep=stop)
    thread = threading.Thread(target=stopped.admit, args=(1_000_000,))
    thread.start()
    assert waits.wait(250)
    limit.admit(1_000_000)
    resumes.set()
    thread.join()
    assert ends == [True]
    assert clock.now == 102.0


def test_a_time_far_ahead_from_before_a_reboot_delays_nothing(tmp_path: Path) -> None:
    later, clock = Clock(), Clock()
    later.now = 1e6
    RateLimit(tmp_path / "rate", CHUNK, clock=later, sleep=later.sleep).admit(CHUNK)
    RateLimit(tmp_path / "rate", CHUNK, clock=clock, sleep=clock.sleep).admit(CHUNK)
    assert clock.now == Clock().now


def test_a_limit_without_its_file_delays_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = RateLimit(tmp_path / "none/rate", 1.0)
    for _ in range(3):
        limit.admit(CHUNK)
    assert caplog.text.count("writing without a speed limit") == 1
