"""Transport through Ray's object store: images for readers on other nodes.

A task on the node of an image reads it from its slot. Ray transfers the result to another node
once, and all readers there map it. The Synchronizer creates the references when the first reader
asks, and keeps them until there is a newer version; the bytes never enter its process.

The module does not import torch, which saves the tasks' processes seconds of import.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trinity_sync.snapshot.ticket import lock_slot, read_version_tag
from trinity_sync.weights.versions import ImageRef, VersionUnavailableError


def start_copy(image: ImageRef) -> list[Any]:
    """Start a copy of an image on its node; return the references of an `ImageCopy`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(image.node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here, "num_returns": 2}
    refs: list[Any] = _as_remote(copy_image).options(**options).remote(image)
    return refs


@cache
def _as_remote(task: Any) -> Any:
    import ray

    return ray.remote(task)


def copy_image(ref: ImageRef) -> Iterator[Any]:
    """Yield version tag and bytes; Ray has stored both before the generator releases the lock."""
    try:
        with lock_slot(Path(ref.slot)) as content:
            tag = read_version_tag(Path(ref.slot))
            if tag is None or tag.image != ref.image:
                raise VersionUnavailableError(f"the image in {ref.slot} was overwritten")
            yield tag
            yield np.frombuffer(content, np.uint8, ref.nbytes)
    except FileNotFoundError as error:
        raise VersionUnavailableError(
            f"the image in {ref.slot} was removed with its trainer"
        ) from error
