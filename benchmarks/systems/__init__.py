"""The systems that are compared, one file each, imported on demand."""

import importlib

from benchmarks.systems.base import System

SYSTEMS = {
    "trinity_sync": "trinity:Trinity",
    "trinity_sync, in place": "trinity:InPlace",
    "trinity_sync, prewarmed": "trinity:Prewarmed",
    "trinity_sync, overlapped": "trinity:Overlapped",
    "trinity_sync, recycled files": "trinity:Recycled",
    "trinity_sync + Prefect": "trinity:WithPrefect",
    "trinity_sync + Prefect, overlapped": "trinity:PrefectOverlapped",
    "trinity_sync + Prefect, recycled files": "trinity:PrefectRecycled",
    "trinity_sync + Prefect, DCP async": "trinity_dcp:DcpOnTrinity",
    "torch.save": "torch_save:TorchSave",
    "veRL": "verl:Verl",
    "Trinity-style thread": "trinity_thread:TrinityThread",
    "DCP async, thread": "dcp:DcpThread",
    "DCP async, process": "dcp:DcpProcess",
    "DCP async, thread, overlapped": "dcp:DcpThreadOverlapped",
    "DCP async, process, overlapped": "dcp:DcpProcessOverlapped",
    "torch-checkpointing": "torch_ckpt:TorchCheckpointing",
    "torch-checkpointing, overlapped": "torch_ckpt:TorchCheckpointingOverlapped",
    "nvidia-resiliency-ext": "nvidia:NvidiaResiliency",
}


def find(name: str) -> type[System] | str:
    """Return the system of that name, or why it cannot run here."""
    module, _, attribute = SYSTEMS[name].partition(":")
    try:
        system: type[System] = getattr(
            importlib.import_module(f"benchmarks.systems.{module}"), attribute
        )
    except ImportError as error:
        return str(error)
    return system.unavailable() or system


__all__ = ["SYSTEMS", "System", "find"]
