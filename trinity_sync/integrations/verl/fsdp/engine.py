"""Functions on a veRL FSDP engine, with the signatures of those in Trinity's workers.

In a broadcast of the full weights all ranks gather them tensor by tensor, and rank 0 sends. veRL's
own ``fsdp_version`` tells FSDP1 from FSDP2, since engines do not.

A rank that fails alone would leave the others waiting in a gather. So each rank first allocates
memory for the next full tensors, and the ranks agree whether all could before they gather.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import (
    fsdp_version,
    load_fsdp_model_to_gpu,
    offload_fsdp_model_to_cpu,
)

from trinity_sync.client.collective import gather_from_ranks
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.integrations.verl.fsdp.manager import FSDPCheckpointManager
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage, metadata_folder
from trinity_sync.layout import split_role_path
from trinity_sync.snapshot.stager import Staged
from trinity_sync.tensors.torch_private import (
    get_fsdp1_handle,
    get_non_persistent_buffers,
    get_shard,
    get_whole_numel,
    unwrap_name,
)
from trinity_sync.weights.broadcast import BUCKET_BYTES, send_weights
from trinity_sync.weights.weight_group import WeightGroup


def use_trinity_sync(engine: Any, coordinator: CheckpointCoordinator) -> FSDPCheckpointManager:
    """Make an initialized engine save and load through ``coordinator``.

    Args:
        engine: veRL's FSDPEngine; its ``checkpoint_manager`` is replaced.
        coordinator: the job's coordinator on this rank.

    Returns:
        The engine's new checkpoint manager.

    Raises:
        SpoolFullError: the images do not fit into shared memory; the message says how many bytes
            they need.
    """
    coordinator.require_room(estimate_image_bytes(engine.module, engine.optimizer))
    manager = FSDPCheckpointManager(
        engine.module,
        engine.optimizer,
        engine.lr_scheduler,
        engine.model_config.get_processor(),
        engine.checkpoint_config,
        trust_remote_code=engine.model_config.trust_remote_code,
        coordinator=coordinator,
    )
    engine.checkpoint_manager = manager
    return manager


def estimate_image_bytes(module: Any, optimizer: Any) -> int:
    """Return the bytes of one rank's images, with twice the model's for the optimizer, as for Adam.

    Without an optimizer, the model alone counts.
    """
    shards = map(get_shard, module.parameters())
    model = sum(shard.numel() * shard.element_size() for shard in shards)
    return model * (3 if optimizer is not None else 1)


def fsdp_save_state_dict(
    engine: Any,
    local_path: str | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> Staged | None:
    """Submit the weights of an engine for a sync through commits; every rank calls it.

    The weights are staged when it returns, so training can continue; explorers find them in
    ``latest_state_dict_iteration.txt`` once they are committed. An engine that saves through
    trinity_sync with ``save_lora_only`` submits the adapter weights alone.

    Args:
        engine: veRL's FSDPEngine.
        local_path: ``<root>/global_step_<N>/<role>``; None does nothing.
        global_step: training step, the N of the path, which is the version of the weights.
        coordinator: the job's coordinator on this rank.
        logger: logs what was staged.

    Returns:
        What was staged: nothing if the step's weights were submitted before. None without a path.

    Raises:
        ConfigError: path and step disagree.
        SpoolFullError: the first save does not fit into the spool. A later save that cannot be
            submitted does not stop training: nothing is staged, and the coordinator's `wait_all`
            raises the error.
    """
    if local_path is None:
        return None
    _, step, role = split_role_path(local_path)
    if step != global_step:
        raise ConfigError(
            f"path {local_path!r} is that of step {step}, but global_step is {global_step}; "
            "pass the same step in both"
        )
    manager: Any = getattr(engine, "checkpoint_manager", None)

    def collect() -> dict[str, Any]:
        ours = isinstance(manager, FSDPCheckpointManager)
        return manager.get_model_state() if ours else get_model_state_to_stage(engine.module)

    states = {"model": _on_device(engine, collect)}
    processing_class = getattr(manager, "processing_class", None)
    metadata = metadata_folder(coordinator, role, engine.module, processing_class)
    staged = coordinator.save(step, states, role=role, kind="state_dict", metadata=metadata)
    if staged.components:
        _log_staged(logger, step, "submitted", staged)
    return staged


def fsdp_upload_state_dict(
    engine: Any, synchronizer: Any, global_step: int, logger: logging.Logger
) -> Staged | None:
    """Publish the weights of an engine in shared memory; every rank calls it.

    Unlike in Trinity, nothing is gathered on rank 0 or sent through the Synchronizer, and no call
    is waited for.

    Args:
        engine: veRL's FSDPEngine, prepared with `use_trinity_sync`.
        synchronizer: the job's Synchronizer, a Ray actor; None as in
            `FSDPCheckpointManager.upload_state_dict`.
        global_step: training step, which is the version of the weights; 0 does nothing.
        logger: logs what was staged.

    Returns:
        As `FSDPCheckpointManager.upload_state_dict`: None if nothing was staged.

    Raises:
        ConfigError: the engine saves without trinity_sync.
        SpoolFullError: the first image does not fit into the spool.
    """
    manager = getattr(engine, "checkpoint_manager", None)
    if not isinstance(manager, FSDPCheckpointManager):
        raise ConfigError(
            f"step {global_step} cannot be uploaded: this engine saves without trinity_sync; call "
            "use_trinity_sync(engine, coordinator) first"
        )
    staged = manager.upload_state_dict(
        global_step,
        synchronizer=synchronizer,
        collect=lambda: _on_device(engine, manager.get_model_state),
    )
    if staged:
        _log_staged(logger, global_step, "uploaded", staged)
    return staged


def _log_staged(logger: logging.Logger, step: int, done: str, staged: Staged) -> None:
    nbytes, stall_ms = f"{staged.nbytes:,}", 1e3 * staged.stall_s
    logger.info("weights of step %d %s: %s bytes staged in %.1f ms", step, done, nbytes, stall_ms)


def _on_device(engine: Any, collect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``collect`` with offloaded parameters on the device, if the model is FSDP1.

    FSDP1 gathers its flat parameters on the device; FSDP2 returns shards where they are.
    """
    needed = fsdp_version(engine.module) == 1 and engine.is_param_offload_enabled
    if needed:
        load_fsdp_model_to_gpu(engine.module)
    try:
        return collect()
    finally:
        if needed:
            offload_fsdp_model_to_cpu(engine.module)


T = TypeVar("T")


def fsdp_sync_weight_nccl(
    engine: Any,
    model_update_group: "WeightGroup | dist.ProcessGroup | None",
    *,
    version: int = 0,
    synchronizer: Any = None,
) -> None:
    """Broadcast the weights of an engine; collective on the ranks of the trainer.

    Ranks gather one tensor (FSDP1: one wrapped module) at a time, and only rank 0 sends. Receivers
    get each parameter once, a tied parameter under its first name of ``named_parameters()``, then
    the persistent buffers, with the names of the unwrapped model. LoRA models have PEFT's names
    (``base_model.model...base_layer.weight``, ``...lora_A.default.weight``): nothing is merged.

    Args:
        engine: veRL's FSDPEngine.
        model_update_group: the group on rank 0, from ``WeightGroupHost`` or torch; None on other
            ranks.
        version: the trainer's step, which is sent to the receivers.
        synchronizer: the job's Synchronizer, a Ray actor, which records the version once all
            receivers have it; None records nothing.

    Raises:
        WeightSyncError: on every rank, if not all receivers have confirmed all tensors. Training
            can continue; no receiver has this version.
        Exception: on the rank that could not gather or send, the cause.
    """
    gathered = _gather(engine)
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            send_weights(gathered, cast(WeightGroup, model_update_group), version=version)
            if synchronizer is not None:
                synchronizer.set_model_state_dict.remote(None, version)
        except Exception as error:
            failure = error
    try:
        for _ in gathered:
            pass  # gathers are collective, also of tensors that rank 0 can no longer send
    except Exception as error:
        failure = failure or error
    outcome = [None if failure is None else str(failure)]
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[0] is not None:
        raise WeightSyncError(
            f"trainer rank {dist.get_rank()}: rank 0 could not send version {version}: {outcome[0]}"
        )


def _gather(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    moved = fsdp_version(engine.module) == 1 and engine.is_param_offload_enabled
    try:
        if moved:
            _run_before_gather(lambda: load_fsdp_model_to_gpu(engine.module))
        yield from iter_full_parameters(engine.module)
    finally:
        if moved:
            offload_fsdp_model_to_cpu(engine.module)


@torch.no_grad()
def iter_full_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full parameters and persistent buffers of an FSDP1, FSDP2 or plain model, each once.

    Collective: every rank iterates to the end. Tensors stay valid after the iteration.
    """
    if fsdp_version(model) == 1:
        yield from _summon_fsdp1(model)
    else:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward alone leaves unsharded copies in another dtype
        yield from _unshard(model.named_parameters())
    yield from _unshard(_iter_persistent_buffers(model))


def _iter_persistent_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in get_non_persistent_buffers(module):
                yield name, buffer


def _summon_fsdp1(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        handle = get_fsdp1_handle(unit)
        if handle and handle.uses_sharded_strategy:
            flat = handle.flat_param
            nbytes = cast(int, get_whole_numel(flat)) * flat.itemsize
            _run_before_gather(functools.partial(_check_memory, nbytes))
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            # tied parameters are in one unit; ids are reused once the unit is sharded again
            named = [*_iter_unit_parameters(prefix, unit)]
            unique = {id(p): (name, p) for name, p in reversed(named)}
            for name, parameter in reversed(unique.values()):
                yield unwrap_name(name), parameter.detach().clone()  # resharding frees the memory


def _iter_unit_parameters(prefix: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters outside of nested FSDP units, which are still sharded."""
    yield from module.named_parameters(prefix=prefix, recurse=False)
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _iter_unit_parameters(f"{prefix}.{name}" if prefix else name, child)


def _unshard(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for batch in _iter_batches(named):
        shards = {name: value for name, value in batch if isinstance(value, DTensor)}
        if shards:
            shards = _run_before_gather(functools.partial(_prepare_shards, shards))
        for name, value in batch:
            yield (
                unwrap_name(name),
                shards[name].full_tensor() if name in shards else value.detach(),
            )


def _iter_batches(
    named: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield several tensors, or a large one: agreement between the ranks costs half a ms."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in named:
        if batch and size + value.nbytes > BUCKET_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, value))
        size += value.nbytes
    if batch:
        yield batch


def _prepare_shards(shards: Mapping[str, DTensor]) -> dict[str, DTensor]:
    _check_memory(sum(shard.nbytes for shard in shards.values()))
    return {
        name: cast(DTensor, shard.detach().to(get_device_id())) for name, shard in shards.items()
    }


def _check_memory(nbytes: int) -> None:
    """Fail here rather than in a gather; a GPU's caching allocator keeps the memory."""
    torch.empty(nbytes, dtype=torch.uint8, device=get_device_id())


def _run_before_gather(prepare: Callable[[], T]) -> T:
    """Run a function on every rank before they gather; raise on all ranks if it failed on any."""
    failure: Exception | None = None
    try:
        result = prepare()
    except Exception as error:
        failure = error
    failed = torch.tensor(failure is not None, dtype=torch.int32, device=get_device_id())
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed.item():
        return result
    reasons = gather_from_ranks(None if failure is None else repr(failure))
    if failure is not None:
        raise failure
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    raise WeightSyncError(
        f"trainer rank {rank} could not gather the weights: {reason}. No receiver has this "
        "version; free memory on that rank, and join a new group for the next version"
    )
