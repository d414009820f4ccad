"""The small files next to the shards: configs and tokenizer, which veRL's merger and users need.

They do not change during training, so they are written to the spool once, and every save packs the
same folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from verl.utils.fsdp_utils import fsdp_version

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.fsdp.state_dict import unwrap_model

FSDP_CONFIG = "fsdp_config.json"
LORA_CONFIG = "lora_train_meta.json"
HUGGINGFACE = "huggingface"

_written: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()


def metadata_folder(
    coordinator: CheckpointCoordinator, role: str, model: Any, processing_class: Any
) -> Path | None:
    """Return the spool folder with the small files of ``model``, written at the first call.

    Args:
        coordinator: the job's coordinator on this rank.
        role: role of the model in the job.
        model: the FSDP model.
        processing_class: tokenizer or processor; may be None.

    Returns:
        None on ranks other than 0, which submit no metadata.
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


def write_metadata(folder: Path, model: Any, processing_class: Any, *, world_size: int) -> None:
    """Write ``fsdp_config.json``, ``huggingface/`` and, with adapters, ``lora_train_meta.json``.

    ``huggingface/`` holds the model's config, its generation config, the tokenizer or processor,
    and the source files of a custom model.

    Args:
        folder: existing folder, whose contents go to the role's folder.
        model: the FSDP model.
        processing_class: tokenizer or processor; may be None.
        world_size: number of ranks that save shards.
    """
    inner = unwrap_model(model)
    config = inner.config
    huggingface = folder / HUGGINGFACE
    huggingface.mkdir(exist_ok=True)
    if getattr(config, "auto_map", None) and None in config.auto_map:
        config.auto_map = {key: value for key, value in config.auto_map.items() if key is not None}
    config.save_pretrained(huggingface)
    generation = _load_generation_config(inner)
    if generation is not None:
        generation.save_pretrained(huggingface)
    if processing_class is not None:
        processing_class.save_pretrained(huggingface)
    if hasattr(config, "auto_map"):
        base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        custom_object_save(base, huggingface, config=config)
    versions = {"FSDP_version": fsdp_version(model), "world_size": world_size}
    (folder / FSDP_CONFIG).write_text(json.dumps(versions, indent=4))
    adapter = _describe_adapter(inner)
    if adapter is not None:
        (folder / LORA_CONFIG).write_text(json.dumps(adapter, indent=4))


def _load_generation_config(inner: Any) -> GenerationConfig | None:
    """Return the generation config of the pretrained model; None if it has none."""
    origin = getattr(inner.config, "name_or_path", None)
    if not origin or not inner.can_generate():
        return None
    try:
        return GenerationConfig.from_pretrained(origin)
    except (OSError, ValueError):  # many models have none
        return None


def _describe_adapter(inner: Any) -> dict[str, Any] | None:
    """Return rank, alpha and task of the LoRA adapter, as veRL's merger reads them, or None."""
    adapters = getattr(inner, "peft_config", None)
    if not adapters:
        return None
    config = adapters.get("default") or next(iter(adapters.values()))
    rank = int(getattr(config, "r", 0) or 0)
    if rank <= 0:
        return None
    task = getattr(config, "task_type", None) or "CAUSAL_LM"
    return {
        "r": rank,
        "lora_alpha": int(getattr(config, "lora_alpha", None) or rank),
        "task_type": str(getattr(task, "value", task)),
    }
