"""Optional use of Ray: for the Synchronizer's actor, and for images of other nodes."""

import sys
from types import ModuleType

from trinity_sync.errors import StackError


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
