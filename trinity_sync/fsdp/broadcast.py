"""A veRL engine's whole weights, gathered tensor by tensor and broadcast by trainer rank 0.

FSDP1 or FSDP2 is asked of the model, by veRL's own ``fsdp_version``: engines do not say it.

A rank that fails alone would leave the others in a gather that it never comes to. So each makes
room for some whole tensors first, and all are told before they gather if one could not.
"""

import functools
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

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.torch_private import (
    WRAPPED,
    get_fsdp1_handle,
    get_non_persistent_buffers,
    get_whole_numel,
)
from trinity_sync.weights.broadcast import BUCKET, send_weights
from trinity_sync.weights.process_group import WeightGroup

T = TypeVar("T")


def fsdp_sync_weight_nccl(
    engine: Any,
    model_update_group: "WeightGroup | dist.ProcessGroup | None",
    *,
    version: int = 0,
    synchronizer: Any = None,
) -> None:
    """Broadcast the weights of an engine; every rank of the trainer calls it.

    Ranks gather one tensor (FSDP1: one wrapped module) at a time, and only rank 0 sends. Receivers
    get each parameter once, a tied one under the name that ``named_parameters()`` gives first, and
    persistent buffers after them, with the names of the unwrapped model. A LoRA model's are PEFT's
    (``base_model.model...base_layer.weight``, ``...lora_A.default.weight``): nothing is merged.

    Args:
        engine: veRL's FSDPEngine.
        model_update_group: rank 0's end of the group, from ``WeightGroupHost`` or torch; other
            ranks pass None.
        version: the trainer's step, which receivers are told.
        synchronizer: the job's, a Ray actor, which is told of the version once all have it.

    Raises:
        WeightSyncError: on every rank, if not all receivers have confirmed all of it. The trainer
            can go on; this version is at nobody's.
        Exception: on the rank that could not gather or send, what kept it from that.
    """
    gathered = _gathered(engine)
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
            pass  # the other ranks gather with rank 0, also what it can no longer send
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


def _gathered(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    moved = fsdp_version(engine.module) == 1 and engine.is_param_offload_enabled
    try:
        if moved:
            _ready(lambda: load_fsdp_model_to_gpu(engine.module))
        yield from whole_parameters(engine.module)
    finally:
        if moved:
            offload_fsdp_model_to_cpu(engine.module)


@torch.no_grad()
def whole_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of an FSDP1, FSDP2 or plain model, each once and whole.

    Every rank iterates to the end. A tensor may be kept.
    """
    if fsdp_version(model) == 1:
        yield from _summoned(model)
    else:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves copies in its own dtype
        yield from _whole(model.named_parameters())
    yield from _whole(_persistent_buffers(model))


def _persistent_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in get_non_persistent_buffers(module):
                yield name, buffer


def _summoned(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        handle = get_fsdp1_handle(unit)
        if handle and handle.uses_sharded_strategy:
            flat = handle.flat_param
            whole = cast(int, get_whole_numel(flat)) * flat.itemsize
            _ready(functools.partial(_make_room, whole))
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            # tied ones are of one unit; ids are those of others once the unit is sharded again
            own = {id(p): (name, p) for name, p in reversed([*_own_parameters(prefix, unit)])}
            for name, parameter in reversed(own.values()):
                yield _clean(name), parameter.detach().clone()  # the unit takes its memory back


def _own_parameters(prefix: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that are not in a wrapped module further in, whose shards they are meanwhile."""
    yield from module.named_parameters(prefix=prefix, recurse=False)
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own_parameters(f"{prefix}.{name}" if prefix else name, child)


def _whole(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for batch in _batches(named):
        shards = {name: value for name, value in batch if isinstance(value, DTensor)}
        if shards:
            shards = _ready(functools.partial(_to_gather, shards))
        for name, value in batch:
            yield _clean(name), shards[name].full_tensor() if name in shards else value.detach()


def _batches(
    named: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Several tensors, or a large one: to be told that all ranks are ready costs half a ms."""
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in named:
        if batch and size + value.nbytes > BUCKET:
            yield batch
            batch, size = [], 0
        batch.append((name, value))
        size += value.nbytes
    if batch:
        yield batch


def _to_gather(shards: Mapping[str, DTensor]) -> dict[str, DTensor]:
    _make_room(sum(shard.nbytes for shard in shards.values()))
    return {
        name: cast(DTensor, shard.detach().to(get_device_id())) for name, shard in shards.items()
    }


def _make_room(nbytes: int) -> None:
    """Fail here rather than in a gather; a GPU's allocator keeps at hand what it has found."""
    torch.empty(nbytes, dtype=torch.uint8, device=get_device_id())


def _ready(prepare: Callable[[], T]) -> T:
    """What every rank does before all of them gather; where one cannot, all raise."""
    failure: Exception | None = None
    try:
        result = prepare()
    except Exception as error:
        failure = error
    failed = torch.tensor(failure is not None, dtype=torch.int32, device=get_device_id())
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if not failed.item():
        return result
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failure is None else repr(failure))
    if failure is not None:
        raise failure
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
    raise WeightSyncError(
        f"trainer rank {rank} could not gather the weights: {reason}. Nobody has this version; "
        "free what that rank lacks, and join a new group for the next"
    )


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
