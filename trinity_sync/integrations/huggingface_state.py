"""What a checkpoint of Hugging Face's `Trainer` holds, and under which names `Trainer` loads it."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from trinity_sync.adapter import Manifest, shard_file
from trinity_sync.errors import ConfigError, from_extra
from trinity_sync.formats.hf_files import require_same_adapter
from trinity_sync.formats.shard_reader import open_shard, require_same_model
from trinity_sync.integrations.import_hooks import replace_attributes
from trinity_sync.integrations.trainer_saves import (
    capture_files,
    get_rng_state,
    set_rng_state,
    try_capture_files,
)
from trinity_sync.snapshot.stager import ATTACHMENTS

with from_extra("hf"):
    from transformers import PreTrainedModel, Trainer
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.trainer import (
        FSDP_MODEL_NAME,
        OPTIMIZER_NAME,
        SCHEDULER_NAME,
        TRAINER_STATE_NAME,
    )
    from transformers.trainer_callback import ExportableState, TrainerState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
    from transformers.utils import (
        ADAPTER_CONFIG_NAME,
        ADAPTER_SAFE_WEIGHTS_NAME,
        ADAPTER_WEIGHTS_NAME,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        is_peft_available,
    )
with from_extra("hf"):  # after transformers, which the message names if all are missing
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

FSDP = DistributedType.FSDP

HUGGINGFACE = "huggingface"
"""Folder of the small files of a model, in the folder of its role."""
_OTHERS = "other_adapters.bin"
"""Name of the extra state, which has all adapters but the active one, by name."""
_LARGE = {OPTIMIZER_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME}
_LARGE |= {SAFE_WEIGHTS_INDEX_NAME, ADAPTER_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME}
"""Names of files that hold what is staged, or an index of them."""


def list_unsupported(args: Any, model: torch.nn.Module) -> list[str]:
    """Return what of a training the callback cannot save, in words."""
    accelerator = AcceleratorState()
    kind = accelerator.distributed_type
    plugin = accelerator.fsdp_plugin if kind is FSDP else None
    sharded = any(isinstance(each, DTensor) for each in model.parameters())
    adapters = getattr(model, "peft_config", {})
    kinds = [getattr(each, "peft_type", "") for each in adapters.values()]
    unsaved = "" if sharded else _find_unsaved(model)  # it was looked for before it was sharded
    unsupported = {
        "save_only_model": args.save_only_model,
        "push_to_hub of checkpoints (set hub_strategy='end')": args.push_to_hub
        and args.hub_strategy != HubStrategy.END,
        kind.value: kind
        in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA),
        "FSDP1 (set fsdp_config={'version': 2})": plugin
        and getattr(plugin, "fsdp_version", 1) != 2,
        "tensor parallelism without FSDP": sharded and kind is not FSDP,
        f"several adapters ({', '.join(adapters)}) with FSDP or add_adapter": len(adapters) > 1
        and (kind is FSDP or not is_adapted(model) or is_injected(model)),
        "AdaLoRA, whose allocation of ranks PEFT does not save": "ADALORA" in kinds,
        f"trained parameters beside the adapter's, as {unsaved} (use modules_to_save)": unsaved,
    }
    return [name for name, found in unsupported.items() if found]


def list_lost_methods(trainer: Any) -> list[str]:
    """Return which methods of a subclass of `Trainer` save what the callback cannot."""
    lost = list_overridden(trainer, "_save_checkpoint")
    owner = next(each for each in type(trainer).__mro__ if "_save_checkpoint" in vars(each))
    if owner.__module__.startswith("trl."):  # calls Trainer's, and writes small files
        lost.clear()
    if trainer.is_fsdp_enabled:  # these would need the whole model
        lost += list_overridden(trainer, "save_model", "_save")
    return [f"{type(trainer).__qualname__}.{name}" for name in lost]


def reads_checkpoints(callback: Any) -> bool:
    """Return whether a callback reads ``checkpoint-N`` in its ``on_save``, as W&B's may.

    Callbacks of transformers keep that in ``_log_model`` and ``_log_checkpoints``.
    """
    models = getattr(callback, "_log_model", None) in ("checkpoint", "all")
    return models or bool(getattr(callback, "_log_checkpoints", None))


def collect_states(trainer: Any, *, sharded: bool, embeddings: bool) -> dict[str, Any]:
    """Return model and optimizer of a trainer, of which each rank has all; of PEFT the adapter.

    Other adapters, such as TRL's frozen ``ref``, are the extra state. Under FSDP2 they are this
    rank's shards, with Accelerate's names.
    """
    model, optimizer = trainer.model, trainer.optimizer
    others: dict[str, Any] = {}
    if is_adapted(model):
        active, *names = list_adapters(model)
        weights = get_adapter_state(model, embeddings, active)
        others = {name: get_adapter_state(model, embeddings, name) for name in names}
    else:
        weights = get_model_state_dict(model) if sharded else model.state_dict()
    if sharded:
        return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}
    states = {"model": weights, "optim": optimizer.state_dict()}
    return {**states, "extra_state": others} if others else states


def collect_files(trainer: Any) -> dict[str, bytes]:
    """Return the small files of a checkpoint, as `Trainer` and its subclass write them, by name.

    They are the RNG states of this rank and what a subclass writes; on rank 0 also the state of
    trainer, schedule, gradient scaler and the config of the adapter.

    Raises:
        ConfigError: a subclass writes a folder, or a file that holds weights or the optimizer.
    """

    def write(folder: Path) -> None:
        own = folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        own.mkdir()
        in_memory = replace_attributes(trainer, _get_output_dir=lambda trial: str(folder))
        with replace_attributes(Trainer, **_WRITERS), in_memory:
            if list_overridden(trainer, "save_model", "_save"):
                trainer.save_model(str(folder), _internal_call=True)
            trainer._save_optimizer_and_scheduler(str(folder))
            type(trainer)._save_checkpoint(trainer, trainer.model, None)  # what TRL's add
        for path in own.iterdir():
            path.rename(folder / path.name)
        own.rmdir()
        for path in folder.iterdir():
            if path.is_dir() or path.name in _LARGE:
                raise ConfigError(
                    f"step {trainer.state.global_step}: {type(trainer).__qualname__} writes "
                    f"{path.name}, which cannot be saved: its {', '.join(_WRITERS)} may call "
                    "Trainer's, and write small files beside; leave the callback out otherwise"
                )
        trainer._save_rng_state(str(folder))
        trainer._save_scaler(str(folder))
        if trainer.args.process_index == 0:
            callbacks = [*trainer.callback_handler.callbacks, trainer.control]
            exported = [each for each in callbacks if isinstance(each, ExportableState)]
            states: Any = TrainerState(stateful_callbacks=exported).stateful_callbacks
            trainer.state.stateful_callbacks.update(states)
            trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            if is_adapted(trainer.model):
                names = list_adapters(trainer.model)
                for name in names[::-1]:
                    trainer.model.peft_config[name].save_pretrained(folder)
                    if len(names) > 1:
                        config = (folder / ADAPTER_CONFIG_NAME).read_bytes()
                        component = "extra_state" if name != names[0] else "model"
                        file = f"{component}.{name}.{ADAPTER_CONFIG_NAME}"
                        (folder / file).write_bytes(config)

    return capture_files(write)


def collect_model_files(trainer: Any) -> dict[str, bytes]:
    """Return what makes a folder of weights a model that ``from_pretrained`` loads, by path.

    They are config, generation config, source files of a custom model, tokenizer or processor,
    below ``huggingface/``; of PEFT's model, whose base is elsewhere, the last alone. They do not
    change during a training. What cannot be written, or would not be loaded, is left out, with a
    warning.
    """
    model, collator = trainer.model, trainer.data_collator
    processing_class = trainer.processing_class or getattr(collator, "tokenizer", None)

    def write_config(folder: Path) -> None:
        with ExitStack() as after:
            after.callback(set_rng_state, get_rng_state())  # a model may draw numbers
            after.enter_context(torch.device("meta"))
            built = type(model)(deepcopy(model.config)).state_dict()
        if differing := built.keys() ^ model.state_dict().keys():
            raise ConfigError(
                f"{min(differing)} is in the model or in a {type(model).__name__}, not in both; "
                "merge or remove what was added, so that from_pretrained loads them"
            )
        config = copy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model._auto_class is not None:
            custom_object_save(model, folder, config=config)

    files: dict[str, bytes] = {}
    if isinstance(model, PreTrainedModel):
        if not is_adapted(model):
            files |= try_capture_files("the config of the model", write_config, f"{HUGGINGFACE}/")
        if model.can_generate() and model.generation_config:
            save = model.generation_config.save_pretrained
            files |= try_capture_files("the generation config", save, f"{HUGGINGFACE}/")
    if save := getattr(processing_class, "save_pretrained", None):
        what = f"the files of the {type(processing_class).__name__}"
        files |= try_capture_files(what, save, f"{HUGGINGFACE}/")
    return files


def list_overridden(trainer: Any, *names: str) -> list[str]:
    """Return which methods of `Trainer` a subclass, or the trainer itself, has replaced."""
    own = vars(trainer)
    return [n for n in names if n in own or getattr(type(trainer), n) is not getattr(Trainer, n)]


def _save_model(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    if trainer.args.should_save:
        trainer._save(output_dir)


def _save(trainer: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
    """Write nothing."""


def _save_optimizer_and_scheduler(trainer: Any, output_dir: str) -> None:
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


_WRITERS: dict[str, Any] = {
    "save_model": _save_model,
    "_save": _save,
    "_save_checkpoint": _save,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
}
"""In the place of `Trainer`'s methods, which write no weights and no optimizer then: these are
staged. The methods of a subclass that call them write what they add."""


def name_files(manifest: Manifest, attached: set[str]) -> dict[str, str]:
    """Return the paths of a step's weights, optimizer and files of the model, by `Trainer`'s names.

    ``attached`` are the names of the step's attachments, which have the same names.
    """
    if any(record.component == "dcp" for record in manifest.files):
        folders = f"{FSDP_MODEL_NAME}_0", f"{Path(OPTIMIZER_NAME).stem}_0"
        return {
            f"{folder}/{Path(record.path).name}": record.path
            for folder in folders
            for record in manifest.files
            if record.role == "actor"
        }
    weights = ADAPTER_WEIGHTS_NAME if ADAPTER_CONFIG_NAME in attached else WEIGHTS_NAME
    adapters: dict[str, str] = {}  # `Trainer` loads several from folders, and reads no other then
    for config in attached:
        if config.endswith(f".{ADAPTER_CONFIG_NAME}"):
            component, name, _ = config.split(".", 2)
            adapters[f"{name}/{ADAPTER_CONFIG_NAME}"] = f"{ATTACHMENTS}/{config}"
            file = f"{name}/{ADAPTER_WEIGHTS_NAME}" if component == "model" else _OTHERS
            adapters[file] = f"actor/{shard_file(component, 1, 0)}"
    prefix = f"actor/{HUGGINGFACE}/"
    small = [
        record.path
        for record in manifest.files
        if record.component == "metadata" and record.path.startswith(prefix)
    ]
    return {
        **{path.removeprefix(prefix): path for path in small},
        **adapters,
        weights: f"actor/{shard_file('model', 1, 0)}",
        OPTIMIZER_NAME: f"actor/{shard_file('optim', 1, 0)}",
    }


def require_fit(model: Any, folder: Path) -> None:
    """Require that a step's folder holds this model or adapter, before any of it is loaded.

    Raises:
        ConfigError: a setting of an adapter, a name or a shape differs.
    """
    configs = dict(getattr(model, "peft_config", {}))
    is_sharded = (folder / f"{FSDP_MODEL_NAME}_0").exists()
    found = [] if is_sharded else folder.glob(f"*/{ADAPTER_CONFIG_NAME}")
    saved = {path.parent.name for path in found}
    if (saved or len(configs) > 1) and saved != configs.keys():
        raise ConfigError(
            f"{folder} holds {', '.join(sorted(saved)) or 'one adapter'}, and this model the "
            f"adapters {', '.join(configs)}. Nothing was loaded; add those that were trained there"
        )
    for name, config in configs.items():
        own = folder / name if saved else folder
        require_same_adapter(own / ADAPTER_CONFIG_NAME, config)
        for file in sorted(own.glob("adapter_model.*"))[:1]:
            state = load_file(file) if file.suffix == ".safetensors" else open_shard(file)
            require_same_model(own, state, get_adapter_state(model, True, name), partial=True)
    if not configs and (file := folder / WEIGHTS_NAME).is_file():
        require_same_model(folder, open_shard(file), model.state_dict())


def is_adapted(model: torch.nn.Module) -> bool:
    """Return whether a model is PEFT's, of which only the adapter is saved."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel) or is_injected(model)


def is_injected(model: torch.nn.Module) -> bool:
    """Return whether a model has an adapter by transformers' ``add_adapter``, and no shards."""
    injected = getattr(model, "_hf_peft_config_loaded", False) is True
    return injected and AcceleratorState().distributed_type is not FSDP


def _get_active(model: Any) -> str:
    name: str = model.active_adapters()[0] if is_injected(model) else model.active_adapter
    return name


def _find_unsaved(model: Any) -> str:
    """Return the name of a parameter that is trained beside the adapters of a model, or nothing.

    Of a prompt, PEFT saves what its encoder computes: a copy of the weights of one that only
    embeds.
    """
    if not is_adapted(model):
        return ""
    states = [get_adapter_state(model, True, each) for each in list_adapters(model)]
    saved = [each for state in states for each in state.values()]
    places = {each.data_ptr() for each in saved}
    has_prompt = any(each.is_prompt_learning for each in model.peft_config.values())
    copies = [each.cpu().double() for each in saved if has_prompt]
    trained = [(n, p.detach()) for n, p in model.named_parameters() if p.requires_grad]
    for name, each in trained:
        is_copied = any(torch.equal(each.cpu().double(), copy) for copy in copies)
        if each.data_ptr() not in places and not is_copied:
            return name
    return ""


def write_safetensors(folder: Path) -> None:
    """Write the weights of each adapter in the one form that transformers itself reads."""

    def load(file: str) -> Any:
        return torch.load(folder / file, map_location="cpu", mmap=False, weights_only=True)

    others = load(_OTHERS) if (folder / _OTHERS).exists() else {}
    for name, state in {"": load(ADAPTER_WEIGHTS_NAME), **others}.items():
        apart = {key: tensor.clone().contiguous() for key, tensor in state.items()}
        save_file(apart, folder / name / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def load_adapter(model: torch.nn.Module, folder: str) -> bool:
    """Load all adapters of a model, of which `Trainer` skips some; return False without any."""
    if not is_adapted(model) or not Path(folder, ADAPTER_SAFE_WEIGHTS_NAME).exists():
        return False
    from peft import set_peft_model_state_dict

    prefix = "base_model.model." if is_injected(model) else ""
    for number, name in enumerate(list_adapters(model)):
        path = Path(folder, name if number else "", ADAPTER_SAFE_WEIGHTS_NAME)
        own = {key.removeprefix(prefix): each for key, each in load_file(path).items()}
        set_peft_model_state_dict(model, own, adapter_name=name)
    return True


def list_adapters(model: Any) -> list[str]:
    """Return the names of the adapters of a model of PEFT, the active one first."""
    active = _get_active(model)
    return sorted(model.peft_config, key=lambda name: name != active)


def get_adapter_state(model: Any, embeddings: bool, name: str | None = None) -> dict[str, Any]:
    """Return the tensors of an adapter of a model of PEFT, by default the active, as PEFT does.

    PEFT would decide at each save whether to include the embeddings, and ask the Hub;
    `has_own_embeddings` decides it once.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = get_peft_model_state_dict(
        model, adapter_name=name or _get_active(model), save_embedding_layers=embeddings
    )
    prefix = "base_model.model." if is_injected(model) else ""
    return {prefix + name: tensor for name, tensor in state.items()}


def has_own_embeddings(model: torch.nn.Module) -> bool:
    """Return whether the embeddings of an adapted model belong into its checkpoints.

    As PEFT decides it (``save_embedding_layers="auto"``), without the Hub: the adapter targets
    them, unless by trainable tokens, or the vocabulary has another size than the base model's,
    whose config is read from its folder or the Hub's cache. They are kept too if they are trained
    themselves, or if that config is found in neither place. Models without an adapter are saved as
    a whole.
    """
    if not is_adapted(model):
        return False
    from peft import PeftType
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import EMBEDDING_LAYER_NAMES, AuxiliaryTrainingWrapper

    adapted: Any = model
    config = adapted.peft_config[_get_active(adapted)]
    by_tokens = (
        config.peft_type == PeftType.TRAINABLE_TOKENS
        or getattr(config, "trainable_token_indices", None) is not None
    )
    targeted = any(
        name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES and isinstance(module, BaseTunerLayer)
        for name, module in model.named_modules()
    )
    if targeted and not by_tokens:
        return True
    for get in ("get_input_embeddings", "get_output_embeddings"):
        layer = getattr(model, get, lambda: None)()
        wrapped = isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))  # PEFT saves these
        if layer is not None and not wrapped and any(p.requires_grad for p in layer.parameters()):
            return True
    known: Any = getattr(model, "config", None)
    base = config.base_model_name_or_path
    vocabulary = getattr(known, "vocab_size", None)
    if not vocabulary or not base:
        return False
    of_base: Any = type(known)
    try:
        return bool(of_base.from_pretrained(base, local_files_only=True).vocab_size != vocabulary)
    except OSError:
        logger.warning(
            "The config of the base model %s is neither in a folder nor in the Hub's cache, so its "
            "vocabulary may have been resized: the embeddings are saved with the adapter",
            base,
        )
        return True


@contextmanager
def load_shards(trainer: Any) -> Iterator[None]:
    """Have `Trainer` load shards under FSDP within the block, whatever it would save itself."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        yield
        return
    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    with replace_attributes(plugin, **dict.fromkeys(names)):
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        yield
