"""Names and forms that Hugging Face transformers expects for the tensors of a trained model.

transformers' own ``save_pretrained`` omits tied weights and splits what it fused while loading
(e.g. the experts of a mixture) into the tensors of the published files. This module does the same,
one layer at a time, with a model on the meta device.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trinity_sync.errors import ConfigError, ExportError
from trinity_sync.snapshot.safe_load import TRUSTED, is_trusted, open_no_follow

Tensors = dict[str, torch.Tensor]

_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Naming:
    """How the tensors of a model are written."""

    shell: Any
    """The transformers model, on the meta device."""
    dropped: frozenset[str]
    """Names of tensors that are not written: tied, or computed when the model is loaded."""
    fuses: bool
    """Whether transformers fuses tensors of a layer when it loads this model."""

    def find_group(self, name: str) -> str:
        """Return the group of a tensor, whose tensors must be written together."""
        layer = _LAYER.match(name) if self.fuses else None
        return layer[1] if layer else name

    def revert_fusion(self, group: Tensors) -> Tensors:
        """Return a group of complete tensors, or meta tensors, as in the published files."""
        if not self.fuses:
            return group
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.shell, group))


def find_naming(folder: Path, names: list[str], *, trust_remote_code: bool = False) -> Naming:
    """Return the naming of the model whose config is in ``folder``.

    Args:
        folder: folder with ``config.json``.
        names: names of the model's tensors, without adapters.
        trust_remote_code: whether source files of the model in that folder may be imported.

    Raises:
        ExportError: there is no config, or transformers cannot build its model.
        ConfigError: the model has source files of its own, and they are not trusted, or other users
            may write them.
    """
    if not (
        folder / "config.json"
    ).is_file():  # transformers would treat the path as a name on the hub
        raise ExportError(
            f"no {folder.name}/config.json in the step ({folder}), which an export needs: save "
            "with metadata=FOLDER that contains huggingface/config.json, as the FSDP manager does"
        )
    if trust_remote_code:
        with TemporaryDirectory(prefix="trinity-code-") as private:
            copy = Path(private, folder.name)
            _copy_code(folder, copy)
            shell = _build_shell(folder, copy, trust_remote_code=True)
    else:
        shell = _build_shell(folder, folder, trust_remote_code=False)
    shell.tie_weights()
    ignored = set(getattr(shell, "_keys_to_ignore_on_save", None) or ())
    return Naming(shell, frozenset(ignored | _find_tied(shell, names)), _has_fusion(shell))


def _build_shell(folder: Path, copy: Path, *, trust_remote_code: bool) -> Any:
    """Build the model of ``folder`` on the meta device, from the files in ``copy``."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(copy, trust_remote_code=trust_remote_code)
        if getattr(config, "auto_map", None) and not trust_remote_code:
            raise ConfigError(
                f"the model of {folder} has source files of its own; if you trust them, export "
                "with --trust-remote-code"
            )
        with torch.device("meta"):
            return find_auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ExportError(
            f"transformers cannot build the model of {folder}/config.json: {error}"
        ) from error


def _copy_code(folder: Path, to: Path) -> None:
    """Copy the config and the source files of a model to a private folder.

    Other users may write the original folder, so only content read from trusted files is imported.

    Raises:
        ConfigError: a file is not trusted.
    """
    for path in [folder / "config.json", *folder.rglob("*.py")]:
        copy = to / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open_no_follow(path) as file:
            if not is_trusted(file.fileno()):
                raise ConfigError(
                    f"{path} is not this user's alone, so no code of the model is imported. If you "
                    f"trust all users who may write it, set {TRUSTED}={folder}"
                )
            copy.write_bytes(file.read())


def find_auto_class(config: Any) -> Any:
    """Return the transformers auto class of a model, as veRL's merger chooses it.

    Raises:
        ExportError: models of this architecture cannot be exported.
    """
    import transformers

    architecture = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    if "ForTokenClassification" in architecture:
        return transformers.AutoModelForTokenClassification
    if "ForCausalLM" in architecture:
        return transformers.AutoModelForCausalLM
    if "ForConditionalGeneration" in architecture:
        return transformers.AutoModelForImageTextToText
    raise ExportError(f"models of architecture {architecture} cannot be exported")


def split_adapter(names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split the tensors of a model with LoRA adapters into base model and adapter.

    Returns:
        Saved name by name in the exported model, and by name in the adapter's file.
    """
    adapter = {name.replace(".default.weight", ".weight"): name for name in names if _LORA in name}
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): name
        for name in names
        if _LORA not in name
    }
    return base, adapter


def build_adapter_config(shapes: Mapping[str, torch.Size], role_folder: Path) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json``, from ``lora_train_meta.json``.

    Args:
        shapes: shapes of the adapter's tensors, by name in its file.
        role_folder: role's folder in the step; without that file, alpha is the rank.
    """
    try:
        trained = json.loads((role_folder / "lora_train_meta.json").read_text())
    except (OSError, ValueError):
        trained = {}
    rank = next((shape[0] for name, shape in shapes.items() if "lora_A" in name), 0)
    return {
        "peft_type": "LORA",
        "task_type": trained.get("task_type", "CAUSAL_LM"),
        "r": trained.get("r", rank),
        "lora_alpha": trained.get("lora_alpha", rank),
        "target_modules": sorted({name.split(".")[-3] for name in shapes}),
        "base_model_name_or_path": None,
        "inference_mode": True,
    }


_LORA = "lora_"


def _find_tied(shell: Any, names: list[str]) -> set[str]:
    """Return the names of tensors that are tied to an earlier tensor, which is written."""
    have, first, tied = set(names), dict[int, str](), set()
    for name, parameter in shell.named_parameters(remove_duplicate=False):
        if name in have and first.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def _has_fusion(shell: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 loads tensors as they are
        return False
    return bool(get_model_conversion_mapping(shell, add_legacy=False))
