"""What veRL 0.9.1 lacks on a CPU, beside a platform of that name; veRL imports it in each process.

``VERL_USE_EXTERNAL_MODULES`` names it, before our switch. Nothing about saving is touched:

- the process group: ``cpu:gloo,<device>:<backend>`` names the CPU twice, which PyTorch refuses;
- the engines: FSDP's are registered for CUDA and NPU only;
- ``torch.cpu`` has neither a cache to empty nor a memory to report.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from grpo_copy.cpu_platform import use_cpu

from trinity_sync.integrations.after_import import change_after_import

_init = dist.init_process_group


def _init_process_group(backend: str | None = None, **named: Any) -> None:
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **named)


def _engines_for_cpu(module: ModuleType) -> None:
    for of_strategy in module.EngineRegistry._engines.values():
        for of_device in of_strategy.values():
            if "cuda" in of_device:
                of_device.setdefault("cpu", of_device["cuda"])


def _nothing(*_: Any) -> int:
    return 0


use_cpu()
dist.init_process_group = _init_process_group
MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
for name in ("empty_cache", *MEMORY):
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, _nothing)
change_after_import({"verl.workers.engine.fsdp.transformer_impl": _engines_for_cpu})
