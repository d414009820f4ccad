"""Optional use of Ray: whether this process is in a cluster, and a job's Synchronizer there."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trinity_sync.errors import ConfigError, StackError
from trinity_sync.weights.state_files import Address, read_address


def in_ray_cluster() -> bool:
    """Return whether this process has joined a Ray cluster, without importing Ray."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # a folder ray/ was imported without it
    return is_initialized is not None and bool(is_initialized())


def require_ray(why: str) -> ModuleType:
    """Import and return Ray; the message of the error begins with ``why``.

    Raises:
        StackError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise StackError(
            f"{why}, and Ray is not installed in this environment. Install the version that your "
            "cluster runs (pip install ray), or read from files: WeightReader(root=...) needs no "
            "Ray on the trainer's node, nor for commits."
        ) from error
    return ray


NAMESPACE = "trinity_sync"
"""Ray namespace of Synchronizers, unless Trinity's config or the caller names another."""


def find_synchronizer(root: str | Path) -> Any | None:
    """Return the Synchronizer of the job at ``root`` if this process is in its Ray cluster."""
    address = read_address(root) if in_ray_cluster() else None
    return _get_actor_at(address) if address else None


def resolve_actor_name(root: str, namespace: str | None, name: str) -> tuple[str, str]:
    """Return name and Ray namespace of a root's Synchronizer, so that it has one at most.

    A running Synchronizer has its own; a new one gets ``name``, and ``namespace`` or `NAMESPACE`.

    Raises:
        ConfigError: the root's Synchronizer runs in another namespace.
    """
    address = read_address(root)
    if address is None or _get_actor_at(address) is None:
        return name, namespace or NAMESPACE
    if namespace and address.namespace != namespace:
        raise ConfigError(
            f"the Synchronizer of {root} is in Ray namespace {address.namespace!r}, not in "
            f"{namespace!r}; pass that namespace, or none, or stop that Synchronizer"
        )
    return address.name, address.namespace


def _get_actor_at(address: Address) -> Any | None:
    import ray

    try:
        return ray.get_actor(address.name, address.namespace)
    except ValueError:
        return None


def get_only_actor(namespace: str) -> Any:
    """Return the only Synchronizer of a Ray namespace.

    Raises:
        ConfigError: there is none, or more than one.
    """
    import ray

    named = [
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace and actor["name"].startswith("synchronizer-")
    ]
    if len(named) != 1:
        raise ConfigError(
            f"namespace {namespace!r} has {len(named)} Synchronizers; pass root, the job's folder"
        )
    return ray.get_actor(named[0], namespace=namespace)
