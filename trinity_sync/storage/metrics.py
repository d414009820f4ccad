"""Metrics of a step: ``root/.trinity_sync/metrics/{step}.json``, read by retention.

They are a file of their own, because an evaluation may end before the commit of the step or long
after it. They count for one run: that which committed the step, or will.
"""

import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, LockTimeoutError, TrinitySyncError
from trinity_sync.fs.atomic import read_uncached, replace_file
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.records import Count, Record, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.runs import find_newest_run

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Seconds to wait for other processes that write metrics."""


@dataclass(frozen=True)
class _Recorded(Record):
    """Content of the file of a step."""

    run: Count
    metrics: dict[str, float]


class MetricsLog:
    """Writes the metrics of a process in a background thread.

    ``find_run`` returns the run whose step metrics are of, see `find_run_of_step`. What was
    recorded before ``has_begun`` returns True, for the process's run, is recorded again afterwards:
    it may be of a step that this run makes.
    """

    def __init__(
        self, root: Path, find_run: Callable[[int], int], has_begun: Callable[[], bool]
    ) -> None:
        self._root = root
        self._find_run = find_run
        self._has_begun = has_begun
        self._writer: ThreadPoolExecutor | None = None
        self._limit_s = WRITE_S
        self._early: list[tuple[int, Mapping[str, float]]] = []

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Submit metrics to be written; see `CheckpointCoordinator.record_metrics`.

        Raises:
            ConfigError: as `check_metrics`.
        """
        numbers = check_metrics(step, metrics)
        self.record_early()
        if not self._has_begun():
            self._early.append((step, numbers))
        self._submit(step, numbers)

    def record_early(self) -> None:
        """Record again what was recorded before the run began, once it has."""
        if self._early and self._has_begun():
            early, self._early = self._early, []
            for step, numbers in early:
                self._submit(step, numbers)

    def close(self) -> None:
        """Wait for metrics that are being written."""
        self.record_early()
        if self._writer:
            self._writer.shutdown()

    def _submit(self, step: int, numbers: Mapping[str, float]) -> None:
        self._writer = self._writer or ThreadPoolExecutor(1, "metrics")
        self._writer.submit(self._write, step, numbers)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            write_metrics(self._root, self._find_run(step), step, metrics, limit_s=self._limit_s)
            self._limit_s = WRITE_S
        except (OSError, TrinitySyncError) as error:
            if isinstance(error, LockTimeoutError):
                self._limit_s = 0.0  # metrics in the queue do not wait as long each
            logger.warning("metrics of step %d are not recorded: %s", step, error)


def check_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers by name.

    Infinities and NaN stay as they are: policies count NaN as the worst value.

    Raises:
        ConfigError: a name cannot be used in a retention policy, or a value is not a number.
    """
    if bad := [name for name in metrics if not re.fullmatch(r"[^:=,]+", name)]:
        raise ConfigError(
            f"metric {bad[0]!r} of step {step} cannot be used in a retention policy; choose a "
            "name without ':', '=' and ','"
        )
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"metrics {sorted(metrics)} of step {step}: a value is not a number ({error}); "
            "pass values that a float can represent"
        ) from error


def find_run_of_step(root: str | Path, step: int) -> int:
    """Return the run that committed a step, otherwise the newest run, which would commit it.

    Raises:
        CommitError, FormatError: as `list_runs`.
    """
    newest = find_newest_run(root)
    return read_run_number(root, step) or (newest.number if newest else 1)


def write_metrics(
    root: str | Path,
    run: int,
    step: int,
    metrics: Mapping[str, float],
    *,
    limit_s: float = WRITE_S,
) -> None:
    """Add to the metrics of a step; replace those of an earlier run, keep those of a later run.

    Raises:
        LockTimeoutError: other processes have held the lock for ``limit_s``.
    """
    path = _file(root, step)
    with acquire_file_lock(path.parent / "lock", limit_s=limit_s):
        before = read_record(_Recorded, path, read_uncached)
        if before and before.run > run:
            return
        known = before.metrics if before and before.run == run else {}
        replace_file(path, encode_record(_Recorded(run, {**known, **metrics})))


def read_metrics(root: str | Path, run: int, step: int) -> dict[str, float]:
    """Return the metrics that a run recorded for a step; none if the file is missing or torn."""
    found = read_record(_Recorded, _file(root, step), read_uncached)
    return found.metrics if found and found.run == run else {}


def copy_metrics(root: str | Path, step: int, run: int, to: int) -> None:
    """Make the metrics that a run recorded for a step those of the later run ``to``.

    Raises:
        LockTimeoutError: as `write_metrics`.
    """
    path = _file(root, step)
    if not path.exists():
        return
    with acquire_file_lock(path.parent / "lock", limit_s=WRITE_S):
        found = read_record(_Recorded, path, read_uncached)
        if found and found.run == run:
            replace_file(path, encode_record(_Recorded(to, found.metrics)))


def remove_metrics(root: str | Path, step: int) -> None:
    """Remove the metrics of a removed step."""
    _file(root, step).unlink(missing_ok=True)


def _file(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "metrics" / f"{step}.json"
