"""What several writers of a node write together stays within the limit."""

from pathlib import Path

import pytest

from trinity_sync.fs.direct_io import LARGEST, RateLimit


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


def test_a_time_far_ahead_from_before_a_reboot_delays_by_one_chunk(tmp_path: Path) -> None:
    later, clock = Clock(), Clock()
    later.now = 1e6
    RateLimit(tmp_path / "rate", LARGEST, clock=later, sleep=later.sleep).admit(LARGEST)
    RateLimit(tmp_path / "rate", LARGEST, clock=clock, sleep=clock.sleep).admit(LARGEST)
    assert clock.now == 101.0


def test_a_limit_without_its_file_delays_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = RateLimit(tmp_path / "none/rate", 1.0)
    for _ in range(3):
        limit.admit(LARGEST)
    assert caplog.text.count("writing without a speed limit") == 1
