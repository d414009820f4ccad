"""veRL's FSDP engines and trainers.

Workers of your own save, load and sync an FSDP engine with the names of this package:
`use_trinity_sync` gives an engine an `FSDPCheckpointManager`, and the ``fsdp_*`` functions submit,
publish and broadcast its weights. `switch` puts saves of ours into veRL's own trainers. veRL's
processes import it before veRL, so a name is imported with its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_sync.integrations.verl.fsdp.broadcast import fsdp_sync_weight_nccl
    from trinity_sync.integrations.verl.fsdp.engine import (
        fsdp_save_state_dict,
        fsdp_upload_state_dict,
        use_trinity_sync,
    )
    from trinity_sync.integrations.verl.fsdp.manager import FSDPCheckpointManager

_MODULES = {
    "FSDPCheckpointManager": "trinity_sync.integrations.verl.fsdp.manager",
    "fsdp_save_state_dict": "trinity_sync.integrations.verl.fsdp.engine",
    "fsdp_sync_weight_nccl": "trinity_sync.integrations.verl.fsdp.broadcast",
    "fsdp_upload_state_dict": "trinity_sync.integrations.verl.fsdp.engine",
    "use_trinity_sync": "trinity_sync.integrations.verl.fsdp.engine",
}
"""Module of each name."""

__all__ = [
    "FSDPCheckpointManager",
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "use_trinity_sync",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
