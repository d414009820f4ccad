"""What veRL 0.9.1 lacks on a CPU, except a platform of that name; veRL imports it in each process.

``VERL_USE_EXTERNAL_MODULES`` names it, before our switch. Nothing about saving is touched:

- the process group: ``cpu:gloo,<device>:<backend>`` names the CPU twice, which PyTorch refuses;
- the engines: FSDP's and VeOmni's are registered for CUDA and NPU only;
- the critic's model: it is loaded with FlashAttention, whatever the configuration says;
- ``torch.cpu`` has neither a cache to empty nor a memory to report.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from grpo_copy.cpu_platform import use_cpu

from trinity_sync.integrations.import_hooks import patch_after_import

_init = dist.init_process_group


def _init_process_group(backend: str | None = None, **named: Any) -> None:
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **named)


def _engines_for_cpu(module: ModuleType) -> None:
    for of_strategy in module.EngineRegistry._engines.values():
        for of_device in of_strategy.values():
            if "cuda" in of_device:
                of_device.setdefault("cpu", of_device["cuda"])


def _critic_without_flash_attention(_: ModuleType) -> None:
    from transformers import AutoModelForTokenClassification as Model

    load = Model.from_pretrained

    def from_pretrained(*arguments: Any, **named: Any) -> Any:
        return load(*arguments, **named | {"attn_implementation": "sdpa"})

    Model.from_pretrained = from_pretrained


def _nothing(*_: Any) -> int:
    return 0


use_cpu()
dist.init_process_group = _init_process_group
MEMORY = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
for name in ("empty_cache", *MEMORY):
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, _nothing)
patch_after_import(
    {
        "verl.utils.model": _critic_without_flash_attention,
        "verl.workers.engine.fsdp.transformer_impl": _engines_for_cpu,
        "verl.workers.engine.veomni.transformer_impl": _engines_for_cpu,
    }
)
