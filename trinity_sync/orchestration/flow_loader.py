"""Import the flows of deployments, once per process."""

import importlib
import sys
from typing import Any

from prefect.flows import Flow

from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.pipeline import PACKAGES

HEARTBEAT_S = 30
"""Seconds between two heartbeats of a flow run, Prefect's minimum. ``worker.heartbeat_timeout``
must be several times as long."""


def load_flow(entrypoint: str | None) -> Flow[..., Any]:
    """Return the flow of an entrypoint, ``package.module.flow`` or ``package.module:flow``.

    Raises:
        ConfigError: The flow cannot be imported here.
    """
    if sys.path[0] != PACKAGES:  # a user's own flows and tasks must not be found first
        sys.path.insert(0, PACKAGES)
    module, _, name = str(entrypoint).replace(":", ".").rpartition(".")
    try:
        flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot import the deployment's entrypoint {entrypoint!r} in this worker: "
            f"{error}. Is the package installed where the worker runs?"
        ) from error
    return flow
