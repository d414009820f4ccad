"""What Trinity's monitors log, as metrics of the steps that are saved: policies may name them.

The trainer's monitor logs a step after its save. An explorer counts steps of its own, so what it
logs is recorded for the version of the weights that it has measured.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_sync.integrations.import_hooks import Call, wrapper
from trinity_sync.integrations.trainer_saves import select_metrics
from trinity_sync.integrations.verl.driver import LOGGED, open_metrics

VERSION = "rollout/model_version"
"""Metric with which an explorer logs the version, before the evaluations of that version."""


@wrapper
def wrap_get_monitor(original: Call, name: Any) -> Any:
    """Wrap ``MONITOR.get``: instances of the class that it returns also record what they log."""
    theirs = original(name)
    if theirs is None:
        return None

    class Monitor(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, *, role: str, config: Any, **named: Any) -> None:
            super().__init__(role=role, config=config, **named)
            is_trainer = role == config.trainer.name
            self._record = LOGGED.note_logged if is_trainer else ExplorerLog(config).note_logged

        def log(self, data: Mapping[str, Any], step: int, *args: Any, **named: Any) -> None:
            super().log(data, step, *args, **named)
            self._record(step, data)

    return Monitor


class ExplorerLog:
    """Records what an explorer logs of the versions that the trainer saves as checkpoints."""

    def __init__(self, config: Any) -> None:
        self._root = Path(config.checkpoint_job_dir).resolve()
        self._every, self._last = config.trainer.save_interval, config.trainer.total_steps
        self._version = 0

    def note_logged(self, step: int, logged: Mapping[str, Any]) -> None:
        """Record what was logged at one of the explorer's steps; a benchmark's is the version."""
        self._version = int(logged.get(VERSION, self._version))
        is_benchmark = any(name.startswith("bench/") for name in logged)
        version = step if is_benchmark else self._version
        saved = version == self._last or (self._every > 0 and version % self._every == 0)
        if version > 0 and (saved or is_benchmark) and (metrics := select_metrics(logged)):
            open_metrics(self._root).record(version, metrics)
