"""What all ranks of a load claim together."""

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from trinity_sync.layout import split_role_path
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import Manifest


def claim_step(role_folder: Path, claim: ExitStack) -> Manifest:
    """What is to be loaded; rank 0 claims it, too."""
    root, step, _ = split_role_path(role_folder)
    if dist.get_rank():
        return require_committed(root, step)
    return claim.enter_context(lease_to_read(root, step, "load by all ranks"))
