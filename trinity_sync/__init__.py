"""Low-overhead asynchronous checkpointing and weight sync for RL post-training.

`CheckpointCoordinator` saves and loads the checkpoints of a training, and `Checkpoints` reads them
beside it. `Synchronizer` and `WeightReader` bring weights to rollout workers, `WeightFolder` and
`FolderReader` to engines that load a folder; `FSDPCheckpointManager` and the ``fsdp_*`` functions
do both for veRL's FSDP engines. A name is imported with its module, and thus with torch, when it is
first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import (
    CatalogError,
    CommitError,
    ConfigError,
    CorruptedCopyError,
    DeltaError,
    EvictedError,
    ExportError,
    FormatError,
    ImageError,
    LockTimeoutError,
    ManifestError,
    MissingPackageError,
    MissingShardsError,
    PrefectApiError,
    RemoteError,
    RequestRefusedError,
    RootError,
    RootInUseError,
    SaveError,
    SaveFailedError,
    SaveTimeoutError,
    SpoolError,
    SpoolFullError,
    StackError,
    StepInUseError,
    SupersededError,
    TicketError,
    TrinitySyncError,
    UnsupportedPrefectError,
    UnsupportedTorchError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from trinity_sync.client.checkpoints import Checkpoints
    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.client.job_settings import set_job_settings
    from trinity_sync.formats.folder_reader import FolderReader
    from trinity_sync.formats.weight_folder import WeightFolder
    from trinity_sync.fsdp.broadcast import fsdp_sync_weight_nccl
    from trinity_sync.fsdp.engine import (
        fsdp_save_state_dict,
        fsdp_upload_state_dict,
        use_trinity_sync,
    )
    from trinity_sync.fsdp.manager import FSDPCheckpointManager
    from trinity_sync.settings import Settings
    from trinity_sync.storage.job_settings import JobSettings
    from trinity_sync.weights.reader import WeightReader
    from trinity_sync.weights.staleness import RolloutGate
    from trinity_sync.weights.synchronizer import Synchronizer

    __version__: str

__all__ = [
    "CheckpointCoordinator",
    "Checkpoints",
    "FSDPCheckpointManager",
    "FolderReader",
    "JobSettings",
    "RolloutGate",
    "Settings",
    "Synchronizer",
    "WeightFolder",
    "WeightReader",
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "set_job_settings",
    "use_trinity_sync",
    "CatalogError",
    "CommitError",
    "ConfigError",
    "CorruptedCopyError",
    "DeltaError",
    "EvictedError",
    "ExportError",
    "FormatError",
    "ImageError",
    "LockTimeoutError",
    "ManifestError",
    "MissingPackageError",
    "MissingShardsError",
    "PrefectApiError",
    "RemoteError",
    "RequestRefusedError",
    "RootError",
    "RootInUseError",
    "SaveError",
    "SaveFailedError",
    "SaveTimeoutError",
    "SpoolError",
    "SpoolFullError",
    "StackError",
    "StepInUseError",
    "SupersededError",
    "TicketError",
    "TrinitySyncError",
    "UnsupportedPrefectError",
    "UnsupportedTorchError",
    "WeightSyncError",
    "__version__",
]

_MODULES = {
    "CheckpointCoordinator": "trinity_sync.client.coordinator",
    "Checkpoints": "trinity_sync.client.checkpoints",
    "FSDPCheckpointManager": "trinity_sync.fsdp.manager",
    "FolderReader": "trinity_sync.formats.folder_reader",
    "JobSettings": "trinity_sync.storage.job_settings",
    "RolloutGate": "trinity_sync.weights.staleness",
    "Settings": "trinity_sync.settings",
    "Synchronizer": "trinity_sync.weights.synchronizer",
    "WeightFolder": "trinity_sync.formats.weight_folder",
    "WeightReader": "trinity_sync.weights.reader",
    "fsdp_save_state_dict": "trinity_sync.fsdp.engine",
    "fsdp_sync_weight_nccl": "trinity_sync.fsdp.broadcast",
    "fsdp_upload_state_dict": "trinity_sync.fsdp.engine",
    "set_job_settings": "trinity_sync.client.job_settings",
    "use_trinity_sync": "trinity_sync.fsdp.engine",
}
"""Module of each name that is imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("trinity-sync")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
