"""Adapters of PEFT: which tensors of a step are the adapter's, and how they are written.

PEFT decides, not the names: its own config, which is committed with the step, is applied to the
base model on the meta device. That tells the names of all tensors in the trained model, which of
them PEFT saves, and under which names. PEFT then loads names and shapes into a second such model,
before anything is written.
"""

import json
import re
import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import ExportError, from_extra
from trinity_sync.formats.hf_naming import SHOWN, Architecture
from trinity_sync.formats.shard_reader import Meta

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_NAME = "default"
"""Name of the adapter in the trained model, as PEFT and veRL call it."""
_SAVED_PREFIX = "base_model.model."
"""Begin of all names in an adapter's file."""
_IN_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class SplitModel:
    """The tensors of a trained model with an adapter."""

    base: dict[str, str]
    """Name in the step by name in the base model; empty if the adapter alone was saved."""
    adapter: dict[str, str]
    """Name in the step by name in the adapter's file."""
    config: bytes
    """Content of the adapter's ``adapter_config.json``."""


def split_adapter(
    architecture: Architecture | None, config: Path, metas: Mapping[str, Meta]
) -> SplitModel:
    """Split the tensors of a model with an adapter into base model and adapter.

    ``config`` is the adapter's, as ``peft_config.save_pretrained`` wrote it. Without
    ``architecture``, the base model, it is that of the folder that the config names. If there is
    none, the tensors have to be the adapter's alone, as ``get_peft_model_state_dict`` returns them,
    and their shapes are not compared.

    Raises:
        ExportError: a tensor is not the model's, or one of the adapter's is missing; or PEFT could
            not load them.
        MissingPackageError: PEFT is not installed.
    """
    content: dict[str, Any] = {**json.loads(config.read_bytes()), "inference_mode": True}
    architecture = architecture or _find_base(content)
    if architecture is None:
        _require_adapter(metas, content, config)
        return SplitModel({}, {name: name for name in metas}, _encode(content))
    with from_extra("stack"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of what was trained, and of the base's folder
        return _split(architecture, config, content, metas)


def _split(
    architecture: Architecture, config: Path, content: dict[str, Any], metas: Mapping[str, Meta]
) -> SplitModel:
    model, base = _apply(architecture, config)
    needed, allowed = _list_saved(model, embeddings=False), _list_saved(model, embeddings=True)
    if metas.keys() <= allowed.keys():  # as PEFT's file has them
        split = SplitModel({}, {name: name for name in metas}, _encode(content))
    else:
        given = {n: saved for n, saved in base.items() if saved in metas}
        # a LoRA that was initialized from the weights of the base model has changed them
        if given and isinstance(content.get("init_lora_weights"), str):
            content["init_lora_weights"] = True
        adapter = {name: saved for name, saved in needed.items() if saved in metas}
        split = SplitModel(given, adapter, _encode(content))
        known = {*model.state_dict(), *base.values()}
        _require_none("the model does not have", metas.keys() - known, config)
    _require_none("the step lacks", needed.keys() - split.adapter.keys(), config)
    _require_loaded(_apply(architecture, config)[0], split.adapter, metas, config)
    return split


def _apply(architecture: Architecture, config: Path) -> tuple[Any, dict[str, str]]:
    """Return PEFT's model on the meta device, and its tensors' names by those in the base model."""
    from peft import PeftConfig, get_peft_model

    shell = deepcopy(architecture.shell)
    names = _list_names(shell)
    loaded = PeftConfig.from_pretrained(config.parent)
    if isinstance(getattr(loaded, "init_lora_weights", None), str):
        loaded.init_lora_weights = True  # others compute with weights, of which there are none
    try:
        with torch.device("meta"):
            model = get_peft_model(shell, loaded, _NAME, low_cpu_mem_usage=True)
    except Exception as error:  # whatever PEFT raises for a config that is not of this model
        raise ExportError(
            f"PEFT cannot apply {config} to the model of {architecture.folder}: {error}; commit "
            "the config of the adapter that was trained"
        ) from error
    found = _list_names(model)
    return model, {
        name: found[key][min(index, len(found[key]) - 1)]  # tied ones have several names
        for key, inside in names.items()
        for index, name in enumerate(inside)
    }


def _list_names(model: Any) -> dict[int, list[str]]:
    """Return the names of each parameter and buffer, several if it is tied, by its ``id``."""
    names: dict[int, list[str]] = {}
    for method in (model.named_parameters, model.named_buffers):
        for name, tensor in method(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return names


def _list_saved(model: Any, *, embeddings: bool) -> dict[str, str]:
    """Return the names of the adapter's tensors in the model, by those in PEFT's file."""
    from peft import get_peft_model_state_dict

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = {id(tensor): name for name, tensor in state.items()}
    saved = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=_NAME, save_embedding_layers=embeddings
    )
    if computed := [name for name, tensor in saved.items() if id(tensor) not in names]:
        raise ExportError(
            f"PEFT computes {computed[0]} as it saves an adapter of this kind, which an export "
            "cannot; save the adapter with PEFT"
        )
    return {name: names[id(tensor)] for name, tensor in saved.items()}


def _require_loaded(
    model: Any, adapter: Mapping[str, str], metas: Mapping[str, Meta], config: Path
) -> None:
    """Require that PEFT fills the adapter of a model with the tensors, and knows all of them."""
    from peft import set_peft_model_state_dict

    wanted = {*_list_saved(model, embeddings=False).values()}
    tensors = {
        name: torch.empty(metas[saved][0], dtype=metas[saved][1], device="meta")
        for name, saved in adapter.items()
    }
    try:
        found = set_peft_model_state_dict(model, tensors, _NAME, low_cpu_mem_usage=True)
    except (RuntimeError, KeyError, ValueError) as error:
        raise ExportError(
            f"PEFT cannot load the adapter with {config}: {error}; commit the config of the "
            "adapter that was trained"
        ) from error
    _require_none("PEFT does not load", found.unexpected_keys, config)
    _require_none("PEFT would not find", wanted.intersection(found.missing_keys), config)


def _require_none(problem: str, names: Collection[str], config: Path) -> None:
    if names:
        shown = ", ".join(sorted(names)[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ExportError(
            f"{problem} {shown}{more}, with the adapter of {config}; save the whole model, or what "
            "peft.get_peft_model_state_dict returns, and the config of that adapter"
        )


def _find_base(content: Mapping[str, Any]) -> Architecture | None:
    """Return the base model that an adapter's config names, if it is in a folder."""
    base = content.get("base_model_name_or_path")
    if base and (Path(base) / "config.json").is_file() and not content.get("auto_mapping"):
        return Architecture(Path(base))
    return None


def _require_adapter(names: Collection[str], content: Mapping[str, Any], config: Path) -> None:
    """Require that names are those in an adapter's file, as far as its config tells.

    Weights outside of layers may be embeddings, which PEFT saves as well if they were resized.
    """
    whole = {*(content.get("modules_to_save") or ())}
    has_biases = content.get("bias", "none") != "none"

    def is_known(name: str) -> bool:
        parts = name.split(".")
        if not name.startswith(_SAVED_PREFIX) or _NAME in parts:
            return False
        is_own = "lora_" in name or whole & {*parts} or (has_biases and parts[-1] == "bias")
        return bool(is_own) or not _IN_LAYER.search(name)

    unknown = [name for name in names if not is_known(name)]
    if unknown and content.get("peft_type") == "LORA":
        _require_none("PEFT does not load", unknown, config)


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
