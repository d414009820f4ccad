"""Low-overhead asynchronous checkpointing and weight sync for RL post-training.

`CheckpointCoordinator` saves and loads the checkpoints of a training, and `Checkpoints` reads them
beside it. `Synchronizer` and `WeightReader` bring weights to rollout workers, `WeightFolder` and
`FolderReader` to engines that load a folder. `trinity_sync.integrations` has a module for each
library, such as ``trinity_sync.integrations.verl``, and `trinity_sync.errors` has all errors.

Everything here needs the package's own dependencies only. A name is imported with its module, and
thus with torch, when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trinity_sync.errors import (
    CommitError,
    ConfigError,
    FormatError,
    LockTimeoutError,
    RootError,
    RootInUseError,
    SaveFailedError,
    SaveTimeoutError,
    SpoolFullError,
    StackError,
    SupersededError,
    TrinitySyncError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from trinity_sync.client.checkpoints import Checkpoints
    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.client.init_root import set_job_settings
    from trinity_sync.client.participant import Participant
    from trinity_sync.client.preemption import EmergencySave
    from trinity_sync.client.rollout_ledger import RolloutLedger
    from trinity_sync.client.save_submitter import SaveHandle
    from trinity_sync.client.saver_control import SaveTrigger
    from trinity_sync.layout import Kind
    from trinity_sync.settings import Settings
    from trinity_sync.snapshot.stager import Staged
    from trinity_sync.snapshot.ticket import VersionTag
    from trinity_sync.storage.job_settings import JobSettings
    from trinity_sync.storage.placement import NodeRanks
    from trinity_sync.weights.folder.published import PublishedVersion
    from trinity_sync.weights.folder.reader import FolderReader, PublishedView
    from trinity_sync.weights.folder.writer import WeightFolder
    from trinity_sync.weights.reader import WeightReader
    from trinity_sync.weights.sync_barrier import SyncSettings
    from trinity_sync.weights.synchronizer import Synchronizer
    from trinity_sync.weights.version_view import VersionView
    from trinity_sync.weights.versions import RolloutGate, Version

    __version__: str

__all__ = [
    "CheckpointCoordinator",
    "Checkpoints",
    "FolderReader",
    "JobSettings",
    "Participant",
    "RolloutGate",
    "RolloutLedger",
    "Settings",
    "Synchronizer",
    "WeightFolder",
    "WeightReader",
    "set_job_settings",
    # what their methods take and return
    "EmergencySave",
    "Kind",
    "NodeRanks",
    "PublishedVersion",
    "PublishedView",
    "SaveHandle",
    "SaveTrigger",
    "Staged",
    "SyncSettings",
    "Version",
    "VersionTag",
    "VersionView",
    # errors that a training or a reader may handle
    "CommitError",
    "ConfigError",
    "FormatError",
    "LockTimeoutError",
    "RootError",
    "RootInUseError",
    "SaveFailedError",
    "SaveTimeoutError",
    "SpoolFullError",
    "StackError",
    "SupersededError",
    "TrinitySyncError",
    "WeightSyncError",
    "__version__",
]

_MODULES = {
    "CheckpointCoordinator": "trinity_sync.client.coordinator",
    "Checkpoints": "trinity_sync.client.checkpoints",
    "EmergencySave": "trinity_sync.client.preemption",
    "FolderReader": "trinity_sync.weights.folder.reader",
    "JobSettings": "trinity_sync.storage.job_settings",
    "Kind": "trinity_sync.layout",
    "NodeRanks": "trinity_sync.storage.placement",
    "Participant": "trinity_sync.client.participant",
    "PublishedVersion": "trinity_sync.weights.folder.published",
    "PublishedView": "trinity_sync.weights.folder.reader",
    "RolloutGate": "trinity_sync.weights.versions",
    "RolloutLedger": "trinity_sync.client.rollout_ledger",
    "SaveTrigger": "trinity_sync.client.saver_control",
    "Settings": "trinity_sync.settings",
    "SaveHandle": "trinity_sync.client.save_submitter",
    "Staged": "trinity_sync.snapshot.stager",
    "SyncSettings": "trinity_sync.weights.sync_barrier",
    "Synchronizer": "trinity_sync.weights.synchronizer",
    "Version": "trinity_sync.weights.versions",
    "VersionTag": "trinity_sync.snapshot.ticket",
    "VersionView": "trinity_sync.weights.version_view",
    "WeightFolder": "trinity_sync.weights.folder.writer",
    "WeightReader": "trinity_sync.weights.reader",
    "set_job_settings": "trinity_sync.client.init_root",
}
"""Module of each name that is imported when it is first used."""


if not TYPE_CHECKING:  # a type checker would take any name for one of this package

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
