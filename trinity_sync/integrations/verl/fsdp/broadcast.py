"""Broadcast of an FSDP engine's full weights: all ranks gather them tensor by tensor, rank 0 sends.

veRL's own ``fsdp_version`` tells FSDP1 from FSDP2, since engines do not. Its engines, whose import
takes seconds, are not needed here.

A rank that fails alone would leave the others waiting in a gather. So each rank first allocates
memory for the next full tensors, and the ranks agree whether all could before they gather.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from trinity_sync.client.collective import gather_from_ranks
from trinity_sync.errors import WeightSyncError
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state
from trinity_sync.tensors.torch_private import get_fsdp1_handle, get_whole_numel, unwrap_name
from trinity_sync.weights.broadcast import BUCKET_BYTES, send_weights
from trinity_sync.weights.weight_group import WeightGroup

T = TypeVar("T")


def fsdp_sync_weight_nccl(
    engine: Any,
    model_update_group: WeightGroup | None,
    *,
    version: int = 0,
    synchronizer: Any = None,
) -> None:
    """Broadcast the weights of an engine; collective on the ranks of the trainer.

    Ranks gather one tensor at a time, and only rank 0 sends; FSDP1 needs memory for a second copy
    of each rank's shards, as in a save. Receivers get each tensor of ``state_dict()`` once, a tied
    parameter under its first name, with the names of the unwrapped model. LoRA models have PEFT's
    names (``base_model.model...base_layer.weight``, ``...lora_A.default.weight``): nothing is
    merged.

    Args:
        engine: veRL's FSDPEngine.
        model_update_group: the group on rank 0, from ``WeightGroupHost.join``; None on other ranks.
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

    Collective: every rank iterates to the end. A tensor is valid until the next one is requested.
    """
    if fsdp_version(model) == 1:
        _run_before_gather(lambda: _check_memory(_count_bytes_to_gather(model)))
        state = get_model_state(model)
    else:
        state = model.state_dict(keep_vars=True)  # tied parameters are one object
    first_names = {id(value): name for name, value in reversed(state.items())}
    yield from _unshard(
        (name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and first_names[id(value)] == name
    )


def _count_bytes_to_gather(model: Any) -> int:
    """Return the bytes of an FSDP1 model's shards and of its largest module, gathered for them."""
    handles = [handle for each in model.modules() if (handle := get_fsdp1_handle(each))]
    flats = [handle.flat_param for handle in handles if handle.uses_sharded_strategy]
    whole = [cast(int, get_whole_numel(flat)) * flat.itemsize for flat in flats]
    return max(whole, default=0) + sum(flat.nbytes for flat in flats)


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
