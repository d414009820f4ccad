"""Ray, where weights need it: for the Synchronizer's actor, and for images of other nodes."""

import sys
from types import ModuleType

from trinity_sync.errors import StackError


def in_ray_cluster() -> bool:
    """Return whether this process has joined a Ray cluster; Ray is not imported for that."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def require_ray(why: str) -> ModuleType:
    """Return Ray.

    Raises:
        StackError: it is not installed; the message begins with ``why`` it is needed.
    """
    try:
        import ray
    except ImportError as error:
        raise StackError(
            f"{why}, and Ray is not installed in this environment. Install the version that your "
            "cluster runs (pip install ray), or read by files: WeightReader(root=...) needs no Ray "
            "on the trainer's node, nor for commits."
        ) from error
    return ray
