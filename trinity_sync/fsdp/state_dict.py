"""State dicts of one rank of a veRL model, as veRL's loader and merger read them.

Nothing is copied: the states alias live tensors, so the caller has to stage them before the next
optimizer step.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_state_ctx

from trinity_sync.errors import ConfigError
from trinity_sync.snapshot.layout_key import UndetachedStateDict
from trinity_sync.snapshot.torch_private import (
    FSDP1_WRAPPED,
    get_fsdp1_handle,
    get_tied_parameters,
    unwrap_name,
)


def unwrap_model(model: Any) -> Any:
    """Return the Hugging Face model inside an FSDP1 or FSDP2 model."""
    return getattr(model, FSDP1_WRAPPED, model)


def get_model_state(model: Any) -> dict[str, Any]:
    """Return this rank's shards of the model, DTensors under FSDP.

    Collective under FSDP1, which gathers each wrapped module; FSDP2 needs no communication. Unlike
    in veRL, GPU tensors stay on the GPU: staging copies them.
    """
    with use_sharded_state_dicts(model):
        state = dict(model.state_dict())
    if fsdp_version(model) == 1:
        for name, first in _iter_tied_under_fsdp1(model):
            state[name] = state[first]
    return state


def get_model_state_to_stage(model: Any) -> dict[str, Any]:
    """Return this rank's shards for staging: FSDP2's own parameters, as detaching is slow."""
    if fsdp_version(model) != 2:
        return get_model_state(model)
    with torch.no_grad():
        return UndetachedStateDict(model.state_dict(keep_vars=True))


def _iter_tied_under_fsdp1(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of tied parameters, which FSDP1 returns as copies, and of their originals."""
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
def use_sharded_state_dicts(model: Any) -> Iterator[None]:
    """Make state dicts of an FSDP1 model sharded within the block; others always are."""
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with get_fsdp_state_ctx(model, StateDictType.SHARDED_STATE_DICT, config, None):
            yield


def select_adapters(state: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter weights of a model's state, found by name as veRL does.

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


def require_trained(model: Any, selected: Collection[str], state: Collection[str]) -> None:
    """Require that all trained weights of a state are selected.

    Raises:
        ConfigError: some are not, such as those of PEFT's ``modules_to_save``.
    """
    trained = {unwrap_name(name) for name, each in model.named_parameters() if each.requires_grad}
    if lost := trained.intersection(state).difference(selected):
        raise ConfigError(
            f"checkpoint.save_lora_only leaves out {min(lost)} and {len(lost) - 1} more weights "
            "that are trained; unset it"
        )


def has_only_adapters(names: Collection[str]) -> bool:
    """Return whether a state with these names was saved with ``save_lora_only``."""
    return bool(names) and all(_is_adapter(name) for name in names)


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".adapter_" in name
