"""Metrics of a step: ``root/.trinity_sync/metrics/{step}.json``, read by retention.

They are a file of their own, because an evaluation may end before the commit of the step or long
after it. The file has the metrics of each run by themselves: those of the run that committed the
step count, whatever a run records that never commits it.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_sync.errors import ConfigError, LockTimeoutError, TrinitySyncError, warn_once
from trinity_sync.fs.atomic import read_uncached, remove_file, replace_file
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.process import hold_handlers
from trinity_sync.fs.records import Count, Record, encode_record, read_record
from trinity_sync.layout import PRIVATE_FOLDER, check_type
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.runs import find_newest_run

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Seconds to wait for other processes that write metrics."""


@dataclass(frozen=True)
class _Recorded(Record):
    """Content of the file of a step."""

    runs: dict[Count, dict[str, float]]
    """The metrics that each run recorded, by its number."""


class MetricsLog:
    """Writes the metrics of a process in a background thread.

    ``find_run`` returns the run whose step metrics are of; None until the process's run has begun,
    and what is recorded waits for that.
    """

    def __init__(self, root: Path, find_run: Callable[[int], int | None]) -> None:
        self._root = root
        self._find_run = find_run
        self._writer: ThreadPoolExecutor | None = None
        self._limit_s = WRITE_S
        self._recorded: deque[tuple[int, Mapping[str, float]]] = deque()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Submit metrics to be written, and raise as `check_metrics`; see `record_metrics`."""
        self._recorded.append((step, check_metrics(step, metrics)))
        self.flush()

    def flush(self, step: int | None = None) -> dict[str, float]:
        """Submit what waits for the run to begin; return what of a step may not be written yet."""
        waiting = [*self._recorded]
        if waiting:
            self._writer = self._writer or ThreadPoolExecutor(1, "metrics")
            with hold_handlers(), suppress(RuntimeError):  # no thread: the next save tries again
                self._writer.submit(self._write)
        found = dict[str, float]()
        for at, metrics in waiting:
            if at == step:
                found |= metrics
        return found

    def close(self) -> None:
        """Wait for metrics that are being written."""
        self.flush()
        if self._writer:
            self._writer.shutdown()
        if self._recorded:
            logger.warning(
                "metrics of steps %s are not recorded: this process has begun no run of %s whose "
                "steps they could be. To record those of a committed step, call "
                "Checkpoints.record_metrics or trinity-sync metrics",
                sorted({step for step, _ in self._recorded}),
                self._root,
            )
            self._recorded.clear()

    def _write(self) -> None:
        while self._recorded:
            step, metrics = self._recorded[0]
            try:
                run = self._find_run(step)
                if run is None:
                    return
                write_metrics(self._root, run, step, metrics, limit_s=self._limit_s)
                self._limit_s = WRITE_S
            except (OSError, TrinitySyncError) as error:
                if isinstance(error, LockTimeoutError):
                    self._limit_s = 0.0  # metrics in the queue do not wait as long each
                logger.warning("metrics of step %d are not recorded: %s", step, error)
            self._recorded.popleft()


def check_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers by name.

    Infinities and NaN stay as they are: policies count them as the worst values.

    Raises:
        ConfigError: a name cannot be used in a retention policy, or a value is not a number.
    """
    check_type(f"metrics of step {step}", metrics, Mapping, "a dict, such as {'reward': 0.9}")
    if bad := [name for name in metrics if not re.fullmatch(r"[^:=,]+", str(name))]:
        raise ConfigError(
            f"metric {bad[0]!r} of step {step} cannot be used in a retention policy; choose a "
            "name without ':', '=' and ','"
        )
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"metrics {sorted(metrics)} of step {step}: a value is not a number ({error}); "
            "pass values that a float can represent"
        ) from error


def find_run_of_step(root: str | Path, step: int) -> int:
    """Return the run that committed a step, otherwise the newest, as `list_runs` has it."""
    newest = find_newest_run(root)
    return read_run_number(root, step) or (newest.number if newest else 1)


def write_metrics(
    root: str | Path,
    run: int,
    step: int,
    metrics: Mapping[str, float],
    *,
    limit_s: float = WRITE_S,
    replaces: bool = True,
) -> None:
    """Add to the metrics that a run recorded for a step; ``replaces`` those of the same names.

    Raises:
        LockTimeoutError: other processes have held the lock for ``limit_s``.
    """
    path = _file(root, step)
    with acquire_file_lock(path.parent / "lock", limit_s=limit_s):
        runs = _read(path)
        recorded = runs.get(run, {})
        runs[run] = {**recorded, **metrics} if replaces else {**metrics, **recorded}
        replace_file(path, encode_record(_Recorded(runs)))


def read_metrics(root: str | Path, run: int, step: int) -> dict[str, float]:
    """Return the metrics that a run recorded for a step; none if the file is missing or torn."""
    metrics, problem = find_metrics(root, run, step)
    if problem:
        warn_once(problem)
    return metrics


def find_metrics(root: str | Path, run: int, step: int) -> tuple[dict[str, float], str]:
    """Return what `read_metrics` does, and why the metrics are unknown, if they are."""
    path = _file(root, step)
    if recorded := read_record(_Recorded, path, read_uncached):
        return recorded.runs.get(run, {}), ""
    if not path.exists():
        return {}, ""
    return {}, (
        f"{path} is torn or edited, so the metrics of step {step} are unknown. Record them again: "
        f"trinity-sync metrics {root} {step} NAME=VALUE; or remove the file"
    )


def add_metrics(save: SaveId, metrics: Mapping[str, float]) -> None:
    """Add metrics to those that the run of a save has recorded for the step, which stay."""
    if not metrics or metrics.keys() <= read_metrics(save.root, save.run, save.step).keys():
        return
    try:
        write_metrics(save.root, save.run, save.step, metrics, replaces=False)
    except LockTimeoutError as error:
        logger.warning(
            "metrics %s of %s are not recorded: %s. Record them with trinity-sync metrics",
            *(sorted(metrics), save, error),
        )


def remove_metrics(root: str | Path, step: int, run: int) -> None:
    """Remove the metrics of a run's removed step, and earlier runs'; raises as `write_metrics`."""
    path = _file(root, step)
    if not path.exists():
        return
    with acquire_file_lock(path.parent / "lock", limit_s=WRITE_S):
        later = {number: kept for number, kept in _read(path).items() if number > run}
        if later:
            replace_file(path, encode_record(_Recorded(later)))
        else:
            remove_file(path)


def _read(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a file by run; none if the file is missing or torn."""
    found = read_record(_Recorded, path, read_uncached)
    return found.runs if found else {}


def _file(root: str | Path, step: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "metrics" / f"{step}.json"
