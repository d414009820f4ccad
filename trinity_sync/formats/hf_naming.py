"""Names and forms that Hugging Face transformers expects for the tensors of a trained model.

transformers' own ``save_pretrained`` omits tied weights and splits what it fused while loading
(e.g. the experts of a mixture) into the tensors of the published files. This module does the same,
one layer at a time, with a model on the meta device. Before anything is written, transformers loads
the names and shapes into such a model: what it would leave at random, or ignore, is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from trinity_sync.errors import ConfigError, ExportError, from_extra
from trinity_sync.formats.shard_reader import Meta
from trinity_sync.fs.atomic import TRUSTED, is_trusted, open_no_follow, walk_files

Tensors = dict[str, torch.Tensor]

SHOWN = 5
"""Tensors that a message names."""
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
    config: bytes
    """Content of ``config.json``, with which transformers loads what is written."""

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

    def plan_groups(self, metas: Mapping[str, Meta]) -> dict[str, tuple[list[str], Tensors]]:
        """Return for each group the names of its tensors, and as meta tensors what is written."""
        groups: dict[str, Tensors] = {}
        for name, (shape, dtype) in metas.items():
            if name not in self.dropped:
                group = groups.setdefault(self.find_group(name), {})
                group[name] = torch.empty(shape, dtype=dtype, device="meta")
        return {key: ([*group], self.revert_fusion(group)) for key, group in groups.items()}


def find_kept(names: Iterable[str], shell: Any, dtype: torch.dtype | None) -> list[str]:
    """Return the names that transformers keeps in ``float32`` in a model of ``dtype``."""
    if dtype not in (torch.float16, torch.bfloat16):
        return []
    patterns = [*(shell._keep_in_fp32_modules_strict or ())]
    if dtype is torch.float16:
        patterns += shell._keep_in_fp32_modules or ()
    pattern = "|".join(patterns).replace("*", ".*") or "$^"
    made = {name for name, tensor in shell.state_dict().items() if tensor.dtype is torch.float32}
    return [name for name in names if name in made or re.search(pattern, name)]


def require_config(folder: Path) -> None:
    """Require that a folder in a step has the config of its model.

    Raises:
        ExportError: it has none.
    """
    if not (folder / "config.json").is_file():
        raise ExportError(
            f"no {folder.name}/config.json in the step ({folder}), which an export needs: save "
            "with metadata=FOLDER that contains huggingface/config.json, which the callback of "
            "Trainer and the FSDP manager do by themselves"
        )


class Architecture:
    """The transformers model of the ``config.json`` in a folder, without its weights.

    ``trust_remote_code`` lets source files of the model in that folder be imported.

    Raises:
        ExportError: there is no config, or transformers cannot build its model.
        ConfigError: the model has source files of its own, and they are not trusted, or other users
            may write them.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        require_config(folder)  # transformers would look for it on the hub
        self.folder = folder
        self._trust_remote_code = trust_remote_code
        self.config = (folder / "config.json").read_bytes()
        self.shell = self._build_shell()
        self._found: tuple[object, Naming] | None = None

    def find_naming(
        self,
        metas: Mapping[str, Meta],
        are_equal: Callable[[str, str], bool],
        *,
        published: bytes | None = None,
    ) -> Naming:
        """Return how tensors are written, once transformers has loaded their names and shapes.

        ``metas`` are without adapters. ``are_equal`` compares the bits of two tensors: of those
        that the config says are tied, an equal one is not written; others are, with a config that
        does not tie them. ``published`` is the content of the ``config.json`` next to the tensors,
        if they are those of published files; they are written as they are.

        Raises:
            ExportError: the tensors are not those of the model; the message names them.
        """
        if getattr(self.shell.config, "quantization_config", None):
            raise ExportError(
                f"{self.folder}/config.json says that the weights are quantized, and the trained "
                "ones are not; pass a config without quantization_config"
            )
        untied = [
            name for name, first in _find_tied(self.shell, metas) if not are_equal(first, name)
        ]
        key = (dict(metas), untied, published)
        if self._found and self._found[0] == key:
            return self._found[1]
        shell, config = self.shell, self.config
        if untied or (published and _is_untied(published) and not _is_untied(config)):
            shell, config = self._build_shell(untied=True), _untie(config)
        tied = {name for name, _ in _find_tied(shell, metas)}
        if still := tied.intersection(untied):
            raise ExportError(
                f"{min(still)} is tied in every model of {self.folder}/config.json, and is not "
                "equal to what it is tied to; transformers cannot load such a model"
            )
        ignored = set(getattr(shell, "_keys_to_ignore_on_save", None) or ())
        fuses = published is None and _has_fusion(shell)
        naming = Naming(shell, frozenset(ignored | tied), fuses, config)
        self._require_loaded(shell, _list_written(naming, metas, self.folder))
        self._found = key, naming
        return naming

    def _require_loaded(self, shell: Any, written: Tensors) -> None:
        """Require that transformers fills the model with tensors, and knows all of them."""
        with from_extra("hf"):
            import accelerate  # noqa: F401  # transformers needs it for the meta device
        with _quiet():
            _, found = type(shell).from_pretrained(
                None,
                config=shell.config,
                state_dict=dict(written),
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        problems = [f"{name} is missing" for name in sorted(found["missing_keys"])]
        problems += [f"{name} is unknown" for name in sorted(found["unexpected_keys"])]
        problems += [
            f"{name} is {[*saved]}, not {[*wanted]}"
            for name, saved, wanted in sorted(found["mismatched_keys"])
        ]
        problems += map(str, found["error_msgs"])
        if problems:
            raise ExportError(
                f"the weights are not those of the {type(shell).__name__} of {self.folder}: "
                f"{'; '.join(problems[:SHOWN])}"
                f"{f' and {len(problems) - SHOWN} more' if problems[SHOWN:] else ''}. Save all "
                "weights of the model whose config.json is there"
            )

    def _build_shell(self, *, untied: bool = False) -> Any:
        """Build the model on the meta device, with a head of its own if ``untied``."""
        from transformers import AutoConfig

        trusts = self._trust_remote_code
        with ExitStack() as removed:
            source = self.folder
            if trusts:
                private = TemporaryDirectory(prefix="trinity-code-")
                source = Path(removed.enter_context(private), self.folder.name)
                _copy_code(self.folder, source)
            try:
                config = AutoConfig.from_pretrained(source, trust_remote_code=trusts)
                if getattr(config, "auto_map", None) and not trusts:
                    raise ConfigError(
                        f"the model of {self.folder} has source files of its own; if you trust "
                        "them, export with --trust-remote-code"
                    )
                if untied:
                    config.tie_word_embeddings = False
                    config.get_text_config().tie_word_embeddings = False
                config.dtype = torch.bfloat16  # also of a model in it, as of a critic
                with torch.device("meta"):  # where it makes in float32 what `find_kept` finds
                    shell = find_auto_class(config).from_config(config, trust_remote_code=trusts)
            except (OSError, ValueError, KeyError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ExportError(
                    f"transformers cannot build the model of {self.folder}/config.json: {error}"
                ) from error
        shell.tie_weights()
        return shell


def _copy_code(folder: Path, to: Path) -> None:
    """Copy the config and the source files of a model to a private folder.

    Other users may write the original folder, so only content read from trusted files is imported.

    Raises:
        ConfigError: a file is not trusted.
    """
    for path in [folder / "config.json", *walk_files(folder, "*.py")]:
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
    """Return the transformers auto class of a model; of a custom one as veRL's merger chooses it.

    Raises:
        ExportError: models of this architecture cannot be exported.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    named = getattr(config, "architectures", None)
    architecture = (named or ["ForCausalLM"])[0]
    for each in vars(modeling_auto).values():
        mapping = getattr(each, "_model_mapping", None) if hasattr(each, "from_config") else None
        names = mapping._model_mapping.get(config.model_type) if mapping else None
        if architecture == names or (isinstance(names, tuple) and architecture in names):
            return each
    if "ForTokenClassification" in architecture:
        return transformers.AutoModelForTokenClassification
    if not (named or type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        raise ExportError(
            f"the config.json of the {config.model_type} model does not say which architecture it "
            "has: set config.architectures = [type(model).__name__] before the config is saved, as "
            "model.save_pretrained does"
        )
    if "ForCausalLM" in architecture:
        return transformers.AutoModelForCausalLM
    if "ForConditionalGeneration" in architecture:
        return transformers.AutoModelForImageTextToText
    raise ExportError(f"models of architecture {architecture} cannot be exported")


def set_in_config(config: bytes, **values: Any) -> bytes:
    """Return the content of a ``config.json`` with other values."""
    return json.dumps({**json.loads(config), **values}, indent=2).encode() + b"\n"


def _untie(config: bytes) -> bytes:
    """Return a config that does not tie the head to the embeddings, for each library's reading."""
    text = json.loads(config).get("text_config")
    values: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(text, dict):
        values["text_config"] = {**text, **values}
    return set_in_config(config, **values)


def _is_untied(config: bytes) -> bool:
    return json.loads(config).get("tie_word_embeddings") is False


def _list_written(naming: Naming, metas: Mapping[str, Meta], folder: Path) -> Tensors:
    """Return what is written, on the meta device."""
    try:
        return {n: t for _, group in naming.plan_groups(metas).values() for n, t in group.items()}
    except Exception as error:  # a group that is not complete, or of other shapes
        raise ExportError(
            f"the weights are not those of the {type(naming.shell).__name__} of {folder}, which "
            f"cannot be split as published: {error!r}"
        ) from error


def _find_tied(shell: Any, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the tensors that the config ties to an earlier tensor, which is written, and that."""
    have, first, tied = {*names}, dict[int, str](), []
    for name, parameter in shell.named_parameters(remove_duplicate=False):
        if name in have and (earlier := first.setdefault(id(parameter), name)) != name:
            tied.append((name, earlier))
    return tied


def _has_fusion(shell: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4 loads tensors as they are
        return False
    return bool(get_model_conversion_mapping(shell, add_legacy=False))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from a report of what it loads."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
