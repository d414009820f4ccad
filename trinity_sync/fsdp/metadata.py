"""The small files next to the shards: configs and tokenizer, for exports and veRL's merger.

They do not change during training, so they are written to the spool once, and every save packs the
same folder. No file that a step can do without stops a save, and what would stop the first save is
tried when training starts.
"""

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.fsdp.state_dict import unwrap_model

logger = logging.getLogger(__name__)

_written: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()


def metadata_folder(
    coordinator: CheckpointCoordinator, role: str, model: Any, processing_class: Any
) -> Path | None:
    """Return the spool folder with the small files of ``model``, written at the first call.

    None on ranks other than 0, which submit no metadata. The tokenizer or processor may be None.
    """
    if coordinator.rank:
        return None
    folder = coordinator.spool.folder / "metadata" / role
    done = _written.setdefault(model, set())
    if folder not in done or not folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        coordinator.spool.make()
        folder.mkdir(parents=True)
        write_metadata(folder, model, processing_class, world_size=coordinator.world_size)
        done.add(folder)
    return folder


def try_metadata(model: Any, processing_class: Any) -> None:
    """Write the small files once and discard them, so that errors come before the first save.

    Raises:
        ConfigError: as `write_metadata`.
    """
    with suppress(OSError), TemporaryDirectory() as folder:  # a full disk here says nothing
        write_metadata(Path(folder), model, processing_class, world_size=1)


def write_metadata(folder: Path, model: Any, processing_class: Any, *, world_size: int) -> None:
    """Write ``fsdp_config.json``, ``huggingface/`` and, with adapters, what describes them.

    The contents of ``folder`` go to the role's folder. ``huggingface/`` holds the model's config,
    its generation config, the tokenizer or processor (may be None), and the source files of a
    custom model. ``lora_adapter/`` holds PEFT's own config of the adapter, for exports; veRL's
    merger reads ``lora_train_meta.json``.

    Raises:
        ConfigError: transformers refuses to save the model's config. All other files of
            ``huggingface/`` are left out with a warning if they cannot be saved.
    """
    inner = unwrap_model(model)
    config = inner.config
    huggingface = folder / "huggingface"
    huggingface.mkdir(exist_ok=True)
    if getattr(config, "auto_map", None) and None in config.auto_map:
        config.auto_map = {key: value for key, value in config.auto_map.items() if key is not None}
    if getattr(config, "tie_word_embeddings", False) and _is_untied(inner):
        config = deepcopy(config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    try:
        config.save_pretrained(huggingface)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the config of the model cannot be saved, and a Hugging Face model needs it: {error}. "
            "Correct config.json of the model before training"
        ) from error
    save_generation = partial(_save_generation_config, inner)
    _write_optional(huggingface, "generation_config.json", save_generation)
    if processing_class is not None:
        what = f"the files of the {type(processing_class).__name__}"
        _write_optional(huggingface, what, processing_class.save_pretrained)
    if hasattr(config, "auto_map"):
        base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        save_code = partial(custom_object_save, base, config=config)
        _write_optional(huggingface, "the source files of the model", save_code)
    versions = {"FSDP_version": fsdp_version(model), "world_size": world_size}
    (folder / "fsdp_config.json").write_text(json.dumps(versions, indent=4))
    adapters = getattr(inner, "peft_config", None) or {}
    if adapter := adapters.get("default") or next(iter(adapters.values()), None):
        write_adapter = adapter.save_pretrained
        _write_optional(folder / "lora_adapter", "the config of the adapter", write_adapter)
    if (rank := int(getattr(adapter, "r", 0) or 0)) > 0:
        task = getattr(adapter, "task_type", None) or "CAUSAL_LM"
        lora = {
            "r": rank,
            "lora_alpha": int(getattr(adapter, "lora_alpha", None) or rank),
            "task_type": str(getattr(task, "value", task)),
        }
        (folder / "lora_train_meta.json").write_text(json.dumps(lora, indent=4))


def _write_optional(folder: Path, what: str, write: Callable[[str], Any]) -> None:
    """Write files that a step can do without, all of them or none; log why they are left out."""
    with TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            write(scratch)
        except Exception as error:  # of transformers, or of a user's tokenizer
            _warn_once(f"checkpoints are saved without {what}, which cannot be saved: {error}")
        else:
            shutil.copytree(scratch, folder, dirs_exist_ok=True)


@lru_cache(maxsize=100)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _save_generation_config(inner: Any, folder: str) -> None:
    """Save the generation config of the pretrained model, if it has one."""
    origin = getattr(inner.config, "name_or_path", None)
    if not origin or not inner.can_generate():
        return
    try:
        generation = GenerationConfig.from_pretrained(origin)
    except OSError:  # many models have none
        return
    generation.save_pretrained(folder)


def _is_untied(inner: Any) -> bool:
    """Return whether a plain model has a head of its own, whatever its config says."""
    layers = [
        getattr(inner, get, lambda: None)()
        for get in ("get_input_embeddings", "get_output_embeddings")
    ]
    weights = [getattr(layer, "weight", None) for layer in layers]
    are_known = all(isinstance(weight, torch.nn.Parameter) for weight in weights)
    return are_known and weights[0] is not weights[1] and not getattr(inner, "peft_config", None)
