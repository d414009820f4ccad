"""Settings of a Synchronizer."""

from dataclasses import dataclass
from typing import Any

from trinity_sync.attribute_docs import describe_attributes


@describe_attributes
@dataclass(frozen=True)
class SyncSettings:
    """Names and time limits; `from_config` reads them from Trinity's config."""

    timeout_s: float = 3600.0
    """Trinity's ``sync_timeout``: seconds to wait, unless the call passes a time-out."""
    role: str = "actor"
    """Role of the weights: the folder under ``global_step_N/``."""
    trainer: str = "trainer"
    """Name of the trainer's Ray actor, for the rendezvous and the group of a broadcast."""
    explorer: str = "explorer"
    """Name of the explorer if a call passes none, as Trinity's calls do."""
    explorer_world_size: int = 1
    """Workers of one explorer that join the group of a broadcast."""
    group: str = "rollout_weight_sync"
    """Name of the process group of a broadcast."""

    @classmethod
    def from_config(cls, config: Any) -> "SyncSettings":
        """Return the settings of a Trinity config; missing values get the defaults."""
        sync = getattr(config, "synchronizer", None)
        ours = cls()
        return cls(
            timeout_s=float(getattr(sync, "sync_timeout", None) or ours.timeout_s),
            trainer=getattr(getattr(config, "trainer", None), "name", None) or ours.trainer,
            explorer=getattr(getattr(config, "explorer", None), "name", None) or ours.explorer,
            explorer_world_size=getattr(sync, "explorer_world_size", None) or 1,
            group=getattr(sync, "group_name", None) or ours.group,
        )
