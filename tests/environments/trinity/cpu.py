"""What veRL 0.8 and Trinity lack on a CPU without vLLM; veRL imports it in each of its processes.

The environment names it (``VERL_USE_EXTERNAL_MODULES``). Neither saving nor syncing is touched.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.integrations.import_hooks import patch_after_import

_init = dist.init_process_group


def _init_process_group(backend: str | None = None, **named: Any) -> None:
    """Take gloo where veRL asks for ``cpu:gloo,cpu:nccl``, the accelerator being the CPU."""
    _init("gloo" if backend and backend.startswith("cpu:gloo,cpu") else backend, **named)


def _no_bytes(*_: Any) -> int:
    return 0


def _names_of_vllm(**modules: list[str]) -> None:
    """What Trinity imports of vLLM to read a data set of texts, and then uses for pictures only."""
    for module, names in modules.items():
        made = ModuleType(f"vllm.{module.replace('__', '.')}")
        vars(made).update(dict.fromkeys(names, object))
        sys.modules[made.__name__] = made


def _engines_for_cpu(module: ModuleType) -> None:
    """Let veRL find its FSDP engines where the device is the CPU, which pins no memory."""
    module.CPUOffloadPolicy = lambda **_: None
    for of_strategy in module.EngineRegistry._engines.values():
        for of_device in of_strategy.values():
            if "cuda" in of_device:
                of_device.setdefault("cpu", of_device["cuda"])


def _critic_without_flash_attention(_: ModuleType) -> None:
    """Have Trinity load the critic's model with the attention that PyTorch has."""
    from transformers import AutoModelForTokenClassification as Model

    for name in ("from_pretrained", "from_config"):
        load = getattr(Model, name)

        def load_with_sdpa(*arguments: Any, load: Any = load, **named: Any) -> Any:
            return load(*arguments, **named | {"attn_implementation": "sdpa"})

        setattr(Model, name, load_with_sdpa)


def _padding_without_flash_attn(module: ModuleType) -> None:
    """Have veRL pad by the functions that it has for NPUs, which are plain PyTorch."""
    from verl.utils import npu_flash_attn_utils as plain

    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    module._get_attention_functions = lambda: tuple(getattr(plain, name) for name in names)


patch_after_import(
    {
        "trinity.trainer.verl.monkey_patch": _critic_without_flash_attention,
        "verl.utils.attention_utils": _padding_without_flash_attn,
        "verl.workers.engine.fsdp.transformer_impl": _engines_for_cpu,
    }
)
dist.init_process_group = _init_process_group
for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    if not hasattr(torch.cpu, name):
        setattr(torch.cpu, name, _no_bytes)  # for its metrics
if not hasattr(torch.cpu, "empty_cache"):
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
torch.cuda.get_device_capability = lambda *_: (8, 0)  # Trinity asks which attention it can use
_names_of_vllm(
    config=["ModelConfig"],
    entrypoints__chat_utils=[
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ],
    inputs=["MultiModalDataDict"],
)
