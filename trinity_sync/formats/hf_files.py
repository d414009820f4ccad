"""Files of an export: weights, config, tokenizer, and the adapter of a model that has one."""

from pathlib import Path

import torch

from trinity_sync.errors import ExportError
from trinity_sync.formats.hf_adapter import ADAPTER_CONFIG, ADAPTER_FILE, SplitModel, split_adapter
from trinity_sync.formats.hf_naming import Architecture, find_kept, set_in_config
from trinity_sync.formats.safetensors import (
    ExportProgress,
    save_compared,
    write_model,
)
from trinity_sync.formats.shard_reader import Meta, ShardedModel
from trinity_sync.fs.progress import OnProgress
from trinity_sync.snapshot.stager import ATTACHMENTS
from trinity_sync.storage.manifest import Manifest

HUGGINGFACE = "huggingface"
ADAPTER = "lora_adapter"
"""Folder of an adapter, in a role's folder in the step and in an export."""
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def write_files(
    progress: ExportProgress,
    model: ShardedModel,
    role_folder: Path,
    adapter_config: Path | None,
    *,
    max_bytes: int,
    trust_remote_code: bool,
    small: list[str],
    on_progress: OnProgress,
) -> None:
    """Write the files of an export, once their names and shapes are known to load.

    The source of ``progress`` has the dtype. ``role_folder`` is in the step, and ``adapter_config``
    PEFT's, None if there is no adapter. ``small`` are the small files of the step to write; none
    for an export into the step.

    Raises:
        ConfigError: source files of the model are not trusted.
        ExportError: the tensors are not those of a model or adapter that can be loaded.
    """
    huggingface, names = role_folder / HUGGINGFACE, model.names
    metas = {name: model.read_meta(name) for name in names}
    base: Architecture | None = None
    if adapter_config is None or (huggingface / "config.json").is_file():
        base = Architecture(huggingface, trust_remote_code=trust_remote_code)
    if adapter_config:
        split = split_adapter(base, adapter_config, metas)
    elif any(name.startswith("base_model.") for name in names):
        raise ExportError(
            f"{names[0]} in {role_folder} is of a model with an adapter, and the step has no "
            f"{ADAPTER}/{ADAPTER_CONFIG}: save with metadata=FOLDER that contains it, as "
            "peft_config.save_pretrained writes it"
        )
    else:
        split = SplitModel({name: name for name in names}, {}, b"")
    naming = None
    if split.base:
        if base is None:
            raise ExportError(f"no {HUGGINGFACE}/config.json in {role_folder}")
        naming = base.find_naming(
            {name: metas[saved] for name, saved in split.base.items()},
            lambda one, other: model.are_equal(split.base[one], split.base[other]),
        )
        if naming.config != base.config and not small:
            raise ExportError(
                f"the config of the step ties weights of {role_folder} that are not equal, and an "
                "export into the step does not change it; export to a FOLDER"
            )
    wanted = DTYPES.get(progress.source["dtype"])
    saved_by_name = {**split.base, **split.adapter}
    kept = find_kept(saved_by_name, naming.shell, wanted) if naming else []
    written: dict[str, Meta] = {}
    for name, saved in saved_by_name.items():
        shape, trained = metas[saved]
        converts = trained.is_floating_point and name not in kept
        written[name] = shape, wanted if wanted and converts else trained
    if naming:
        write_model(
            progress,
            model,
            split.base,
            naming,
            {name: written[name] for name in split.base},
            max_bytes=max_bytes,
            on_progress=on_progress,
        )
    if split.adapter:
        progress.write_file(
            f"{ADAPTER}/{ADAPTER_FILE}",
            lambda path: save_compared(
                path,
                {
                    name: model.read_tensor(saved, written[name][1])
                    for name, saved in split.adapter.items()
                },
            ),
        )
        progress.write_file(
            f"{ADAPTER}/{ADAPTER_CONFIG}", lambda path: path.write_bytes(split.config)
        )
    dtypes = [written[name][1] for name in split.base or split.adapter]
    kinds = [dtype for dtype in dtypes if dtype.is_floating_point]
    for name in small:
        content = (huggingface / name).read_bytes()
        if name == "config.json" and kinds:
            content = naming.config if naming else content
            content = set_dtype(content, max(set(kinds), key=kinds.count))
        progress.write_file(name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]


def find_adapter_config(folder: Path, manifest: Manifest, role: str) -> Path | None:
    """Return PEFT's own config, which the FSDP manager or the callback of `Trainer` commits."""
    for path in (f"{role}/{ADAPTER}/{ADAPTER_CONFIG}", f"{ATTACHMENTS}/{ADAPTER_CONFIG}"):
        if manifest.find_file(path):
            return folder / path
    return None


def set_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return a model's ``config.json`` with the dtype of the written weights."""
    key = "torch_dtype" if b'"torch_dtype"' in config else "dtype"
    return set_in_config(config, **{key: str(dtype).removeprefix("torch.")})
