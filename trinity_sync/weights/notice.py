"""A commit tells the job's Synchronizer, if there is one, and never waits for it or fails by it."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from trinity_sync.weights.files import Address, read_address

logger = logging.getLogger(__name__)


def tell_committed(
    root: str | Path, run: int, step: int, kinds: Sequence[str]
) -> threading.Thread | None:
    """Have the Synchronizer of the job know that a step of ``kinds`` is committed.

    Returns:
        The thread that tells it; None, and nothing was imported, where the job has none.
    """
    address = read_address(root)
    if address is None:
        return None
    told = (str(root), run, step, tuple(kinds))
    thread = threading.Thread(target=_tell, args=(address, told), daemon=True, name="tell commit")
    thread.start()
    return thread


def _tell(address: Address, told: tuple[str, int, int, tuple[str, ...]]) -> None:
    try:
        import ray

        if ray.is_initialized():
            ray.get_actor(address.name, address.namespace).committed.remote(*told)
    except Exception as error:  # it reads the manifests when it is started again
        logger.warning("the Synchronizer %s was not told of a commit: %r", address.name, error)
