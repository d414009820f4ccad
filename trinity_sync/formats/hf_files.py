"""Files of an export: weights, config, tokenizer, and the adapter of a model that has one.

Adapters: which tensors are the adapter's, and how they are written. PEFT decides, not the names:
its own config, which is committed with the step, is applied to the base model on the meta device.
That tells the names of all tensors in the trained model, which of them PEFT saves, and under which
names. PEFT then loads names and shapes into a second such model, before anything is written.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import ConfigError, ExportError, from_extra
from trinity_sync.formats.hf_naming import SHOWN, Architecture, find_kept, set_in_config
from trinity_sync.formats.safetensors import ExportProgress, save_compared, write_model
from trinity_sync.formats.shard_reader import Meta, SavedState
from trinity_sync.fs.direct_io import OnProgress
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


_COMPUTED = {"peft_type", "lora_alpha", "alpha", "alpha_pattern", "use_rslora", "fan_in_fan_out"}
"""Settings of an adapter that change what its tensors compute, and neither names nor shapes."""


def require_same_adapter(saved: Path, live: Any) -> None:
    """Require that an adapter computes with a live config of PEFT as with that at a path, if any.

    Raises:
        ConfigError: a setting, such as ``lora_alpha``, differs.
    """
    trained = json.loads(saved.read_bytes()) if live and saved.is_file() else {}
    for name in trained.keys() & _COMPUTED:
        if trained[name] != (now := getattr(live, name, None)):
            raise ConfigError(
                f"the adapter of {saved.parent} was trained with {name}={trained[name]!r}, and "
                f"this model's has {now!r}. Nothing was loaded; pass what it was trained with"
            )


def write_files(
    progress: ExportProgress,
    model: SavedState,
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
    huggingface, metas = role_folder / HUGGINGFACE, model.metas
    base: Architecture | None = None
    if adapter_config is None or (huggingface / "config.json").is_file():
        base = Architecture(huggingface, trust_remote_code=trust_remote_code)
    split = _split_model(role_folder, base, adapter_config, metas)
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
        _write_adapter(progress, model, split, written)
    counts = Counter[torch.dtype]()
    for name in split.base or split.adapter:
        counts[written[name][1]] += written[name][0].numel()
    kinds = [dtype for dtype, _ in counts.most_common() if dtype.is_floating_point]
    for name in small:
        content = (huggingface / name).read_bytes()
        if name == "config.json" and kinds:
            content = set_dtype(naming.config if naming else content, kinds[0])
        progress.write_file(name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]


def _split_model(
    role_folder: Path,
    base: Architecture | None,
    adapter_config: Path | None,
    metas: Mapping[str, Meta],
) -> "SplitModel":
    if adapter_config:
        return split_adapter(base, adapter_config, metas)
    if any(name.startswith("base_model.") for name in metas):
        raise ExportError(
            f"{next(iter(metas))} in {role_folder} is of a model with an adapter, and the step has "
            f"no {ADAPTER}/{ADAPTER_CONFIG}: save with metadata=FOLDER that contains it, as "
            "peft_config.save_pretrained writes it"
        )
    return SplitModel({name: name for name in metas}, {}, b"")


def _write_adapter(
    progress: ExportProgress, model: SavedState, split: "SplitModel", written: Mapping[str, Meta]
) -> None:
    def save(path: Path) -> None:
        tensors = split.adapter.items()
        save_compared(path, {n: model.read_tensor(saved, written[n][1]) for n, saved in tensors})

    progress.write_file(f"{ADAPTER}/{ADAPTER_FILE}", save)
    progress.write_file(f"{ADAPTER}/{ADAPTER_CONFIG}", lambda path: path.write_bytes(split.config))


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
    try:
        saved = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=_NAME, save_embedding_layers=embeddings
        )
        computed = [name for name, tensor in saved.items() if id(tensor) not in names]
    except RuntimeError:  # the meta device has no values to compute with
        computed = ["tensors"]
    if computed:
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
