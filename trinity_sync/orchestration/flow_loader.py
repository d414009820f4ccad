"""What makes a worker quick that runs one flow after another: flows imported, settings at hand."""

import importlib
import sys
from typing import Any

from prefect.context import SettingsContext, get_settings_context
from prefect.flows import Flow

from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.pipeline import PACKAGES

HEARTBEAT_S = 30
"""Seconds between two heartbeats of a run; Prefect allows no fewer. What counts as silent
(``TRINITY_SYNC_SILENT_S``) has to be a multiple of it."""


class WholeSettings(SettingsContext):
    """The settings of this process, handed to tasks as they are.

    Prefect takes them apart for each task and reads them anew in the task's process, from the
    environment and all: 0.15 s a task, twice on a save's way. Pickling them takes 3 ms.
    """

    @classmethod
    def of_now(cls) -> "WholeSettings":
        """Those that the calling context has, with a heartbeat as often as Prefect allows."""
        now = get_settings_context()
        flows = now.settings.flows.model_copy(update={"heartbeat_frequency": HEARTBEAT_S})
        settings = now.settings.model_copy(update={"flows": flows})
        return cls(profile=now.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """What a task runner gives to every task, pickled."""
        return {"profile": self.profile, "settings": self.settings}


_flows: dict[str, Flow[..., Any]] = {}


def load_flow(entrypoint: str | None) -> Flow[..., Any]:
    """The flow that a deployment names (``package.module.flow`` or ``package.module:flow``).

    Raises:
        ConfigError: it cannot be imported here.
    """
    if entrypoint not in _flows:
        if sys.path[0] != PACKAGES:  # a user's own flows and tasks must not be found first
            sys.path.insert(0, PACKAGES)
        module, _, name = str(entrypoint).replace(":", ".").rpartition(".")
        try:
            flow = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the deployment's entrypoint {entrypoint!r} cannot be imported by this worker: "
                f"{error}. Is the package installed where the worker runs?"
            ) from error
        _flows[str(entrypoint)] = flow
    return _flows[str(entrypoint)]
