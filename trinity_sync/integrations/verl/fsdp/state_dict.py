"""What a rank of a veRL model saves: state dicts, small files next to them, and checks.

State dicts are those that veRL's loader and merger read. Nothing is copied: the states alias live
tensors, so the caller has to stage them before the next optimizer step.

The small files are configs and tokenizer, for exports and veRL's merger. They do not change during
training, so they are collected once, when training starts. No file that a step can do without stops
it.
"""

import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from verl.utils.fsdp_utils import fsdp_version, get_fsdp_state_ctx

from trinity_sync.client.collective import run_on_all_ranks
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.integrations.trainer_saves import capture_files, try_capture_files
from trinity_sync.layout import (
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    PRIVATE_FOLDER,
    shard_file,
    split_role_path,
)
from trinity_sync.snapshot.image import UndetachedStateDict
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import is_foreign, read_latest_pointer, require_committed
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import fill_states
from trinity_sync.tensors.dtensors import compute_own_box, find_replicas
from trinity_sync.tensors.torch_private import (
    FSDP1_WRAPPED,
    get_fsdp1_handle,
    get_tied_parameters,
    unwrap_name,
)

logger = logging.getLogger(__name__)


def unwrap_model(model: Any) -> Any:
    """Return the Hugging Face model inside an FSDP1 or FSDP2 model."""
    return getattr(model, FSDP1_WRAPPED, model)


def get_model_state(model: Any) -> dict[str, Any]:
    """Return this rank's shards of the model, DTensors under FSDP.

    Collective under FSDP1, which gathers each wrapped module; FSDP2 needs no communication. Unlike
    in veRL, GPU tensors stay on the GPU: staging copies them.
    """
    with use_sharded_state_dicts(model):
        state = dict(model.state_dict())
    if fsdp_version(model) == 1:
        for name, first in _iter_tied_under_fsdp1(model):
            state[name] = state[first]
    return state


def get_model_state_to_stage(model: Any) -> dict[str, Any]:
    """Return this rank's shards for staging: FSDP2's own parameters, as detaching is slow."""
    if fsdp_version(model) != 2:
        return get_model_state(model)
    with torch.no_grad():
        return UndetachedStateDict(model.state_dict(keep_vars=True))


def _iter_tied_under_fsdp1(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of tied parameters, which FSDP1 returns as copies, and of their originals."""
    for name, module in model.named_modules():
        handle = get_fsdp1_handle(module)
        for tied in get_tied_parameters(getattr(handle, "flat_param", None)):
            inner = (
                (tied.module_name, tied.param_name),
                (tied.prim_module_name, tied.prim_param_name),
            )
            mine, first = (".".join(filter(None, (name, *parts))) for parts in inner)
            inside = f"{FSDP1_WRAPPED}."
            yield mine.replace(inside, ""), first.replace(inside, "")


def has_replicas(model: Any, state: Mapping[str, Any], rank: int) -> bool:
    """Return whether HSDP's replicas of a model's state are saved once.

    Under FSDP1 they are not: its shards name the process groups of the rank that saved them.
    Nor is a model with other tensors than DTensors, such as statistics of each rank's own data.
    """
    tensors = (each for each in state.values() if isinstance(each, torch.Tensor))
    is_sharded = fsdp_version(model) == 2 and all(isinstance(each, DTensor) for each in tensors)
    return is_sharded and len(find_replicas([state], rank)) > 1


def fill_model(
    model: Any, folder: Path, manifest: Manifest, spool: JobSpool | None, rank: int, world_size: int
) -> dict[str, Any]:
    """Fill FSDP2's shards in place, and return their state by component.

    Empty if they are not those of the step, as with another dtype: `load_state_dict` decides.
    FSDP1's shards are copies.
    """
    if fsdp_version(model) != 2:
        return {}
    root, _, role = split_role_path(folder)
    live = {"model": dict(model.state_dict())}
    how: Any = {"spool": spool, "run_together": partial(run_on_all_ranks, folder)}
    try:
        return fill_states(root, manifest, role, live, rank=rank, world_size=world_size, **how)
    except ConfigError as error:
        logger.info("%s: %s", folder, error)
        return {}


@contextmanager
def use_sharded_state_dicts(model: Any) -> Iterator[None]:
    """Make state dicts of an FSDP1 model sharded within the block; others always are."""
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with get_fsdp_state_ctx(model, StateDictType.SHARDED_STATE_DICT, config, None):
            yield


def select_adapters(state: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter weights of a model's state, found by name as veRL does.

    Raises:
        ConfigError: there are none.
    """
    adapters = type(state)((name, value) for name, value in state.items() if _is_adapter(name))
    if not adapters:
        raise ConfigError(
            f"checkpoint.save_lora_only is set, but none of the model's {len(state)} weights is "
            "an adapter's; unset it, or set model.lora_rank"
        )
    return adapters


def require_trained(model: Any, selected: Collection[str], state: Collection[str]) -> None:
    """Require that all trained weights of a state are selected.

    Raises:
        ConfigError: some are not, such as those of PEFT's ``modules_to_save``.
    """
    trained = {unwrap_name(name) for name, each in model.named_parameters() if each.requires_grad}
    if lost := trained.intersection(state).difference(selected):
        raise ConfigError(
            f"checkpoint.save_lora_only leaves out {min(lost)} and {len(lost) - 1} more weights "
            "that are trained; unset it"
        )


def has_only_adapters(names: Collection[str]) -> bool:
    """Return whether a state with these names was saved with ``save_lora_only``."""
    return bool(names) and all(_is_adapter(name) for name in names)


def _is_adapter(name: str) -> bool:
    return "lora_" in name or ".adapter_" in name


_collected: WeakKeyDictionary[Any, dict[str, bytes]] = WeakKeyDictionary()


def collect_metadata(model: Any, processing_class: Any, *, again: bool = False) -> dict[str, bytes]:
    """Return the small files of a model on rank 0, and nothing on other ranks.

    They are made at the first call for the model, and ``again``.

    Raises:
        ConfigError: as `make_metadata`.
    """
    if dist.get_rank():
        return {}
    if again or model not in _collected:
        _collected[model] = make_metadata(model, processing_class)
    return _collected[model]


def make_metadata(model: Any, processing_class: Any) -> dict[str, bytes]:
    """Return ``fsdp_config.json``, ``huggingface/`` and, with adapters, what describes them.

    The paths are below the role's folder. ``huggingface/`` holds the model's config, its generation
    config, the tokenizer or processor (may be None), and the source files of a custom model.
    ``lora_adapter/`` holds PEFT's own config of the adapter, for exports; veRL's merger reads
    ``lora_train_meta.json``.

    Raises:
        ConfigError: transformers refuses to save the model's config. All other files of
            ``huggingface/`` are left out with a warning if they cannot be saved.
    """
    inner = unwrap_model(model)
    config = inner.config
    if getattr(config, "auto_map", None) and None in config.auto_map:
        config.auto_map = {key: value for key, value in config.auto_map.items() if key is not None}
    if getattr(config, "tie_word_embeddings", False) and _is_untied(inner):
        config = deepcopy(config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    try:
        files = capture_files(config.save_pretrained, "huggingface/")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the config of the model cannot be saved, and a Hugging Face model needs it: {error}. "
            "Correct config.json of the model before training"
        ) from error
    save_generation = partial(_save_generation_config, inner)
    files |= try_capture_files("generation_config.json", save_generation, "huggingface/")
    if processing_class is not None:
        what = f"the files of the {type(processing_class).__name__}"
        files |= try_capture_files(what, processing_class.save_pretrained, "huggingface/")
    if hasattr(config, "auto_map"):
        base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        save_code = partial(custom_object_save, base, config=config)
        files |= try_capture_files("the source files of the model", save_code, "huggingface/")
    versions = {"FSDP_version": fsdp_version(model), "world_size": dist.get_world_size()}
    files["fsdp_config.json"] = json.dumps(versions, indent=4).encode()
    adapters = getattr(inner, "peft_config", None) or {}
    if adapter := adapters.get("default") or next(iter(adapters.values()), None):
        what = "the config of the adapter"
        files |= try_capture_files(what, adapter.save_pretrained, "lora_adapter/")
    if (rank := int(getattr(adapter, "r", 0) or 0)) > 0:
        task = getattr(adapter, "task_type", None) or "CAUSAL_LM"
        lora = {
            "r": rank,
            "lora_alpha": int(getattr(adapter, "lora_alpha", None) or rank),
            "task_type": str(getattr(task, "value", task)),
        }
        files["lora_train_meta.json"] = json.dumps(lora, indent=4).encode()
    return files


def _save_generation_config(inner: Any, folder: Path) -> None:
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


_SHARD = re.compile(r"(?P<component>\w+)_world_size_(?P<world_size>\d+)_rank_\d+\.pt")


def check_loadable(role_folder: Path, world_size: int, components: Sequence[str]) -> int:
    """Require that a folder is committed and complete; return the number of ranks that saved it.

    That is ``world_size``, of the ranks that load it, if the folder has shards of as many.
    One rank calls it for all. The names of the files are checked, not their sizes or content.
    Only files are checked in jobs that trinity_sync never saved, and in a step without a manifest
    that the latest pointer names: another system saved it into this job.

    Raises:
        CommitError: the step is not committed, or a component or a rank's shard is missing.
        ConfigError: the folder is missing.
    """
    if not role_folder.is_dir():
        raise ConfigError(f"there is no checkpoint folder {role_folder}; check the path to resume")
    names = _list_committed_files(role_folder)
    if names is None:
        names = [path.name for path in role_folder.iterdir()]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    sizes = {
        name: {int(each["world_size"]) for each in shards if each["component"] == name}
        for name in components
    }
    for component, found in sizes.items():
        if not found:
            raise CommitError(
                f"{role_folder} holds no {component!r}, so it cannot be loaded; resume from a "
                "step that latest_checkpointed_iteration.txt names, or take the component out of "
                "checkpoint.load_contents"
            )
    common = set.intersection(*sizes.values()) if sizes else {world_size}
    saved_by = world_size if world_size in common else max(common, default=world_size)
    missing = {shard_file(name, saved_by, rank) for name in components for rank in range(saved_by)}
    missing.difference_update(names)
    if missing:
        raise CommitError(f"{role_folder} lacks {', '.join(sorted(missing))}; load another step")
    return saved_by


def require_placed(state: Mapping[str, Any]) -> None:
    """Require of each DTensor that its shards can be put together, by whatever reads them.

    Raises:
        ConfigError: the shards of one cannot; the message names it and its placements.
    """
    for name, value in state.items():
        if isinstance(value, DTensor):
            try:
                compute_own_box(value)
            except ValueError as error:
                raise ConfigError(
                    f"{name} {error}. Another mesh, an export and readers of weights could not "
                    "put it together; give each rank one piece of it (Shard, Replicate, or "
                    "fully_shard over parallelize_module)"
                ) from error


def require_whole_parameters(model: Any, optimizer: Any) -> None:
    """Require that no parameter of a VeOmni model is a slice that its DTensor does not tell.

    With VeOmni's expert parallelism the ranks have different experts under one name, in DTensors of
    the same shape and place. It and Muon also have several optimizers with one state dict.

    Raises:
        ConfigError: the model or optimizer is one of these.
    """
    if getattr(model, "_fqn2spec_info", None) or getattr(optimizer, "_is_multi_optimizer", False):
        raise ConfigError(
            "VeOmni's expert parallelism and its optimizer muon cannot be saved by trinity_sync: "
            "another mesh, an export and readers of weights would put experts together wrongly; "
            "set expert_parallel_size=1 and optim.optimizer=adamw, or unset "
            "VERL_USE_EXTERNAL_MODULES"
        )


def _list_committed_files(role_folder: Path) -> list[str] | None:
    """Return the role's committed file names; None if trinity_sync did not save the step."""
    try:
        root, step, role = split_role_path(role_folder)
    except ConfigError:
        return None
    revalidate_folder(role_folder.parent)  # another node may have committed it just now
    if not (role_folder.parent / MANIFEST).exists():
        marked = (role_folder.parent / FULL_CHECKPOINT_MARK).exists()  # its manifest was lost
        is_latest = not marked and read_latest_pointer(root, "checkpoint") == step
        foreign = is_latest and is_foreign(role_folder.parent)
        if foreign or not (root / PRIVATE_FOLDER).exists():
            return None  # the pointer moves to a committed step after its manifest and mark exist
    prefix = f"{role}/"
    files = require_committed(root, step, paths=()).files  # the load itself checks them
    return [r.path.removeprefix(prefix) for r in files if r.path.startswith(prefix)]
