"""A Prefect server, a Ray node and a flow worker on one machine, started and stopped as daemons."""

from importlib.util import find_spec

PACKAGES = ("prefect", "ray", "sqlalchemy")
"""Packages of the ``stack`` extra; an environment without one of them has the client only."""


def list_missing_packages() -> list[str]:
    """Return the packages of the stack that this environment lacks."""
    return [name for name in PACKAGES if find_spec(name) is None]
