"""What a rank of a veRL model consists of, as veRL's loader and merger expect to find it.

Nothing is copied here: the states alias live tensors, so whoever takes them stages them before the
next optimizer step.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_state_ctx

from trinity_sync.errors import ConfigError
from trinity_sync.snapshot.layout_key import Undetached
from trinity_sync.snapshot.torch_private import (
    FSDP1_WRAPPED,
    get_fsdp1_handle,
    get_tied_parameters,
)


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside an FSDP1 or FSDP2 model."""
    return getattr(model, FSDP1_WRAPPED, model)


def model_state(model: Any) -> dict[str, Any]:
    """This rank's shards of the model, under FSDP a DTensor each.

    FSDP1 gathers each wrapped module to take its shards out, which every rank takes part in; FSDP2
    needs no communication. Unlike in veRL, GPU tensors stay where they are: staging copies them.
    """
    with sharded(model):
        state = dict(model.state_dict())
    if fsdp_version(model) == 1:
        for name, first in _tied_under_fsdp1(model):
            state[name] = state[first]
    return state


def model_to_stage(model: Any) -> dict[str, Any]:
    """The same to be staged; FSDP2's parameters themselves, since detaching them takes longest."""
    if fsdp_version(model) != 2:
        return model_state(model)
    with torch.no_grad():
        return Undetached(model.state_dict(keep_vars=True))


def _tied_under_fsdp1(model: Any) -> Iterator[tuple[str, str]]:
    """Names of parameters that are others, whose shards FSDP1 hands out as copies."""
    for name, module in model.named_modules():
        handle = get_fsdp1_handle(module)
        for tied in get_tied_parameters(getattr(handle, "flat_param", None)):
            inner = (
                (tied.module_name, tied.param_name),
                (tied.prim_module_name, tied.prim_param_name),
            )
            mine, first = (".".join(filter(None, (name, *parts))) for parts in inner)
            inside = f"{FSDP1_WRAPPED}."
            yield mine.replace(inside, ""), first.replace(inside, "")


@contextmanager
def sharded(model: Any) -> Iterator[None]:
    """States of an FSDP1 model are those of this rank's shards meanwhile; others' always are."""
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with get_fsdp_state_ctx(model, StateDictType.SHARDED_STATE_DICT, config, None):
            yield


def lora_only(state: dict[str, Any]) -> dict[str, Any]:
    """The adapter weights of a model's state, told by name as veRL does.

    Raises:
        ConfigError: there are none.
    """
    adapters = type(state)((name, value) for name, value in state.items() if _is_adapter(name))
    if not adapters:
        raise ConfigError(
            f"checkpoint.save_lora_only is set, but none of the model's {len(state)} weights is "
            "an adapter's; unset it, or set model.lora_rank"
        )
    return adapters


def adapters_only(names: Collection[str]) -> bool:
    """Whether a state with these names was saved with ``save_lora_only``."""
    return bool(names) and all(_is_adapter(name) for name in names)


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".adapter_" in name
