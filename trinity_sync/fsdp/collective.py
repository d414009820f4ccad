"""The lease of a step that all ranks load."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from trinity_sync.layout import split_role_path
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import Manifest


def lease_step_on_all_ranks(role_folder: Path, leased: ExitStack) -> Manifest:
    """Return the manifest of the step to load; rank 0 also acquires a lease on it.

    Args:
        role_folder: ``<root>/global_step_<N>/<role>``.
        leased: stack that releases the lease.
    """
    root, step, _ = split_role_path(role_folder)
    if dist.get_rank():
        return require_committed(root, step)
    return leased.enter_context(lease_to_read(root, step, "load by all ranks"))
