"""What Hugging Face calls the tensors of a trained model, and which of them it wants to have.

transformers' own ``save_pretrained`` drops tied weights and turns what it fused while loading (the
experts of a mixture, say) back into the tensors of the published files. The same is done here, a
layer at a time, with a model that has shapes and no data to ask.
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
    """How the tensors of one model are written."""

    shell: Any
    """The transformers model, on the meta device."""
    dropped: frozenset[str]
    """Tensors that are not written: tied to others, or rebuilt when the model is loaded."""
    fuses: bool
    """Whether transformers fuses tensors of a layer when it loads this model."""

    def group(self, name: str) -> str:
        """What has to be at hand together to be written."""
        layer = _LAYER.match(name) if self.fuses else None
        return layer[1] if layer else name

    def written(self, group: Tensors) -> Tensors:
        """A group of whole tensors (or of shapes, on the meta device) as it is written."""
        if not self.fuses:
            return group
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.shell, group))


def find_naming(folder: Path, names: list[str], *, trust_remote_code: bool = False) -> Naming:
    """How the model is written whose config is in ``folder``.

    Args:
        folder: with ``config.json``.
        names: of the model's tensors, without adapters.
        trust_remote_code: whether source files of the model in that folder may be imported.

    Raises:
        ExportError: there is no config, or it is of a model that transformers cannot make.
        ConfigError: the model has source files of its own, and they are not trusted, or others may
            write them.
    """
    if not (folder / "config.json").is_file():  # transformers would take the path for a hub's name
        raise ExportError(
            f"no {folder.name}/config.json in the step ({folder}); an export needs one: save with "
            "metadata=FOLDER, which holds huggingface/config.json, as the FSDP manager does"
        )
    if trust_remote_code:
        with TemporaryDirectory(prefix="trinity-code-") as alone:
            copy = Path(alone, folder.name)
            _copy_code(folder, copy)
            shell = _shell_of(folder, copy, trust_remote_code=True)
    else:
        shell = _shell_of(folder, folder, trust_remote_code=False)
    shell.tie_weights()
    ignored = set(getattr(shell, "_keys_to_ignore_on_save", None) or ())
    return Naming(shell, frozenset(ignored | _tied(shell, names)), _fuses(shell))


def _shell_of(folder: Path, copy: Path, *, trust_remote_code: bool) -> Any:
    """The model of ``folder`` on the meta device, made of what is in ``copy``."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(copy, trust_remote_code=trust_remote_code)
        if getattr(config, "auto_map", None) and not trust_remote_code:
            raise ConfigError(
                f"the model of {folder} has source files of its own; if you trust them, export "
                "with --trust-remote-code"
            )
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ExportError(f"no model can be made of {folder}/config.json: {error}") from error


def _copy_code(folder: Path, to: Path) -> None:
    """Copy the source files of a model, and the config that names them, to where nobody else is.

    Others may write the folder, so what is imported is what was read from files that are trusted.

    Raises:
        ConfigError: one of them is not.
    """
    for path in [folder / "config.json", *folder.rglob("*.py")]:
        copy = to / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open_no_follow(path) as file:
            if not is_trusted(file.fileno()):
                raise ConfigError(
                    f"{path} is not this user's alone, so no code of the model is imported. If you "
                    f"trust who may write it, set {TRUSTED}={folder}"
                )
            copy.write_bytes(file.read())


def auto_class(config: Any) -> Any:
    """The transformers auto class of a model, as veRL's merger takes it.

    Raises:
        ExportError: it is none of those that can be exported.
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
    """Take a model with LoRA adapters apart.

    Returns:
        Name in the model by name in the exported model, and by name in the adapter's file.
    """
    adapter = {name.replace(".default.weight", ".weight"): name for name in names if _LORA in name}
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): name
        for name in names
        if _LORA not in name
    }
    return base, adapter


def adapter_config(shapes: Mapping[str, torch.Size], role_folder: Path) -> dict[str, Any]:
    """peft's ``adapter_config.json``; rank, alpha and task are those of ``lora_train_meta.json``.

    Args:
        shapes: of the adapter's tensors, by name in its file.
        role_folder: of the step; without the file alpha is taken to be the rank.
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


def _tied(shell: Any, names: list[str]) -> set[str]:
    """Names of tensors that are another one's, of which the first is written."""
    have, first, tied = set(names), dict[int, str](), set()
    for name, parameter in shell.named_parameters(remove_duplicate=False):
        if name in have and first.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def _fuses(shell: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 loads tensors as they are
        return False
    return bool(get_model_conversion_mapping(shell, add_legacy=False))
