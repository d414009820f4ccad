"""A full model as Hugging Face weight files, beside the config and tokenizer of the metadata.

Only weight files are written: the small files in the same folder belong to the ``metadata``
component, and two writers of one file would leave a manifest that does not match.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl.utils.transformers_compat import drop_tied_target_keys, get_auto_model_for_vision2seq

from trinity_sync.errors import ConfigError

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def auto_class(config: Any) -> Any:
    """The transformers auto class that veRL's merger would take for this model.

    Raises:
        ConfigError: it is none of those that can be exported.
    """
    architecture = (getattr(config, "architectures", None) or ["?"])[0]
    if "ForTokenClassification" in architecture:
        return AutoModelForTokenClassification
    if "ForCausalLM" in architecture:
        return AutoModelForCausalLM
    if "ForConditionalGeneration" in architecture:
        return get_auto_model_for_vision2seq()
    raise ConfigError(
        f"models of architecture {architecture} cannot be exported as hf_model; "
        "take hf_model out of checkpoint.save_contents, or merge the shards later"
    )


def export_weights(
    state: dict[str, torch.Tensor], config: Any, folder: Path, *, trust_remote_code: bool = False
) -> None:
    """Write ``state`` to ``folder`` as ``model.safetensors``, in parts where it is large.

    Args:
        state: whole tensors by their name in the model; consumed.
        config: the model's Hugging Face config; not changed.
        folder: made where missing. Files appear in it whole, each by a rename;
            to make them durable is the commit's.
        trust_remote_code: whether the model's own source files may be imported.
    """
    with torch.device("meta"):
        shell = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    drop_tied_target_keys(state, shell, config)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder.parent / f".{folder.name}.hf_model.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        shell.save_pretrained(scratch, state_dict=state)
        for pattern in _WEIGHT_FILES:
            for file in sorted(scratch.glob(pattern)):
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
