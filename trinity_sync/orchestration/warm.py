"""What a process that runs one flow after another keeps between them.

Settings are serialized once and flows are imported once; doing either for every run is what makes
a cold worker slow.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from prefect.context import SettingsContext, get_settings_context
from prefect.flows import Flow

import trinity_sync
from trinity_sync.errors import ConfigError


class SettingsOnce(SettingsContext):
    """The settings of this process, serialized once and not again for every task of every run."""

    @classmethod
    def of_now(cls) -> "SettingsOnce":
        """Those that the calling context has."""
        now = get_settings_context()
        return cls(profile=now.profile, settings=now.settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """As Prefect's, which a task runner calls for every task."""
        key = (id(self.settings), include_secrets)
        if key not in _serialized:
            # with the settings themselves, so that no others can come to have their id
            _serialized[key] = (self.settings, super().serialize(include_secrets=include_secrets))
        return _serialized[key][1]


_serialized: dict[tuple[int, bool], tuple[Any, dict[str, Any]]] = {}

PACKAGES = str(Path(trinity_sync.__file__).parent.parent)
"""The folder that holds flows, tasks and trinity_sync as they were installed."""

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
