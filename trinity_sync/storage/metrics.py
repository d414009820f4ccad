"""What a training measured at a step: ``root/.trinity_sync/metrics/{step}.json``, for retention.

A file of its own, because an evaluation may end before the step's commit or long after it.
"""

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError, FormatError, LockTimeoutError
from trinity_sync.fs.atomic import read_uncached, replace_file
from trinity_sync.fs.locks import file_lock
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import PRIVATE_FOLDER, ROOT_FORMAT

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Seconds in which another process has written its metrics of a step."""


@dataclass(frozen=True)
class _Recorded(Record, format=ROOT_FORMAT):
    """The file of a step."""

    run: Count
    metrics: dict[str, float]


class MetricsLog:
    """Writes the metrics of a process in a thread of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writer: ThreadPoolExecutor | None = None
        self._limit_s = WRITE_S

    def record(self, run: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics over to be written; see `CheckpointCoordinator.record_metrics`.

        Infinities and NaN are written as they are: policies count NaN as the worst value.
        """
        if bad := [name for name in metrics if not re.fullmatch(r"[^:=,]+", name)]:
            raise ConfigError(
                f"metric {bad[0]!r} of step {step} cannot be named in a retention policy; give it "
                "a name without ':', '=' and ','"
            )
        try:
            numbers = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"metrics {sorted(metrics)} of step {step}: a value is no number ({error}); pass "
                "numbers that a float can hold"
            ) from error
        self._writer = self._writer or ThreadPoolExecutor(1, "metrics")
        self._writer.submit(self._write, run, step, numbers)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer:
            self._writer.shutdown()

    def _write(self, run: int, step: int, metrics: Mapping[str, float]) -> None:
        try:
            write_metrics(self._root, run, step, metrics, limit_s=self._limit_s)
            self._limit_s = WRITE_S
        except (OSError, FormatError, LockTimeoutError) as error:
            if isinstance(error, LockTimeoutError):
                self._limit_s = 0.0  # those in line do not wait as long, one after the other
            logger.warning("the metrics of step %d are not recorded: %s", step, error)


def write_metrics(
    root: str | Path,
    run: int,
    step: int,
    metrics: Mapping[str, float],
    *,
    limit_s: float = WRITE_S,
) -> None:
    """Add to the metrics of a step; those of an earlier run are replaced, a later run's stay.

    Raises:
        LockTimeoutError: others have the lock of the metrics for ``limit_s`` seconds.
        FormatError: another release has recorded metrics of the step, which stay.
    """
    path = _file(root, step)
    with file_lock(path.parent / "lock", limit_s=limit_s):
        before = _read(path)
        if before and before.run > run:
            return
        known = before.metrics if before and before.run == run else {}
        replace_file(path, encode_record(_Recorded(run, {**known, **metrics})))


def read_metrics(root: str | Path, run: int, step: int) -> dict[str, float]:
    """The metrics that a run recorded at a step; a torn file counts as none.

    Raises:
        FormatError: another release has recorded them.
    """
    found = _read(_file(root, step))
    return found.metrics if found and found.run == run else {}


def copy_metrics(
    root: str | Path, step: int, run: int, to: int, *, limit_s: float = WRITE_S
) -> None:
    """Have the metrics that a run recorded at a step count for a later run, whose step it is now.

    Raises:
        LockTimeoutError, FormatError: as `write_metrics`.
    """
    path = _file(root, step)
    if not path.exists():
        return
    with file_lock(path.parent / "lock", limit_s=limit_s):
        found = _read(path)
        if found and found.run == run:
            replace_file(path, encode_record(_Recorded(to, found.metrics)))


def remove_metrics(root: str | Path, step: int) -> None:
    """Remove the metrics of a step that is gone."""
    _file(root, step).unlink(missing_ok=True)


def _read(path: Path) -> _Recorded | None:
    try:
        return decode_record(_Recorded, read_uncached(path), path)
    except (FileNotFoundError, ValueError):
        return None


def _file(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "metrics" / f"{step}.json"
