"""Broadcast of a trainer's full weights to all members of a process group, over gloo or NCCL.

A broadcast consists of a first header (version), buckets, a last header (without tensors), and a
barrier. Before each bucket a header has the names, dtypes and shapes of its tensors:
the trainer gathers one tensor at a time, and can give up before each bucket.

A bucket is a buffer into which many tensors are copied, or a larger tensor itself; two buffers
alternate, one being filled, or read, while the other is in flight.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from operator import index
from typing import Any

import torch

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.tensors.deserialize import find_fault
from trinity_sync.tensors.dtensors import have_equal_bits
from trinity_sync.weights.weight_group import WeightGroup

ALIGNMENT = 16
BUCKET_BYTES = 64 << 20

Named = tuple[str, torch.Tensor]


def iter_buckets(
    params: Iterable[Named], group: WeightGroup, bucket_bytes: int
) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Yield buckets, and name, dtype, shape and number of bytes of the tensors in each.

    A bucket is ``uint8`` of ``bucket_bytes`` at most, whose memory is used again for the second
    bucket after it; or a single larger tensor, which has to be sent before the next bucket.

    Raises:
        ConfigError: a tensor is a DTensor.
    """
    index = nbytes = 0
    records: list[Any] = []
    for name, tensor in params:
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(f"tensor {name!r} is sharded; send its full_tensor()")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        size = len(flat)
        record = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size)
        if records and nbytes + size > bucket_bytes:
            yield group.get_buffer(index, nbytes)[:nbytes], records
            index, nbytes, records = 1 - index, 0, []
        if size > bucket_bytes:
            yield flat.to(group.device), [record]
            continue
        group.get_buffer(index, _align(bucket_bytes))[nbytes : nbytes + size].copy_(flat)
        records.append(record)
        nbytes = _align(nbytes + size)
    if records:
        yield group.get_buffer(index, nbytes)[:nbytes], records


def iter_received(group: WeightGroup) -> Generator[Named, None, None]:
    """Yield names and tensors as they arrive, which are views of buffers.

    A bucket is yielded once the receive of the next one is posted, in the other of two buffers.

    Raises:
        WeightSyncError: a member died, failed or did not send in time.
    """
    previous: Iterable[Named] = ()
    for buffer in cycle((0, 1)):
        header = group.receive_header()
        if "tensors" not in header:
            break
        payload = group.get_buffer(buffer, header["nbytes"])[: header["nbytes"]]
        works = _start_bucket(group, payload)
        yield from previous
        group.wait(works)
        previous = _iter_tensors(header["tensors"], payload)
    yield from previous


def _start_bucket(group: WeightGroup, bucket: torch.Tensor) -> list[Any]:
    """Start to send or receive a bucket, which is empty if its tensors are; return the works."""
    return [group.broadcast(bucket)] if len(bucket) else []


def _iter_tensors(records: Iterable[Any], payload: torch.Tensor) -> Iterator[Named]:
    """Yield tensors in a buffer, given name, dtype, shape and bytes of each."""
    at = 0
    for name, dtype, shape, size in records:
        flat = payload[at : at + size] if size else payload.new_empty(0)
        yield name, flat.view(getattr(torch, dtype)).reshape(shape)
        at += _align(size)


def _align(size: int) -> int:
    return -size % ALIGNMENT + size


def send_weights(
    params: Iterable[Named], group: WeightGroup, *, version: int, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Send every tensor once, and wait until all members have confirmed that they have them all.

    Args:
        params: names and dense tensors, on any device. A tensor may be changed or deleted once the
            next one is requested.
        group: group of which this process is rank 0.
        version: the trainer's step, which is sent to the receivers.
        bucket_bytes: bytes that are sent at a time, unless a tensor is larger; each side keeps two
            buckets.

    Returns:
        Number of bytes sent, without headers.

    Raises:
        ConfigError: this is not rank 0, or a tensor is sharded.
        WeightSyncError: a member died, failed or was too slow. No member may use this version.
        Exception: as ``params`` raised it; receivers raise a :class:`WeightSyncError` that has it.
    """
    _require_member(group, sends=True)
    if bucket_bytes < ALIGNMENT:
        raise ConfigError(f"a bucket of {bucket_bytes} bytes is too small; use some MiB")
    count = total = 0
    in_flight = list[Any]()
    try:
        group.send_header(version=index(version))
        for bucket, records in iter_buckets(params, group, bucket_bytes):
            group.send_header(tensors=records, nbytes=len(bucket))
            works = _start_bucket(group, bucket)
            group.wait(in_flight)
            in_flight = works
            if len(bucket) > bucket_bytes:  # a tensor's own memory, which may change now
                group.wait(in_flight)
                in_flight = []
            count += len(records)
            total += sum(size for *_, size in records)
        group.wait(in_flight)
        group.send_header(end=True)
        group.barrier()
    except BaseException as error:
        group.fail(f"the trainer gave up after {count} tensors of version {version}: {error!r}")
        raise
    return total


@contextmanager
def receive_weights(group: WeightGroup) -> Iterator[tuple[int, Iterator[Named]]]:
    """Wait for rank 0 to begin a broadcast; yield its version, the trainer's step, and its tensors.

    Usage::

        with receive_weights(group) as (version, tensors):
            for name, tensor in tensors:
                ...

    Names and tensors come as they arrive. A tensor is in a buffer on the group's device, and valid
    until the next one is requested. The end of the ``with`` block confirms the version: it is
    complete, and all members know so, once the block has been left without an error. An exception
    in the block fails the broadcast for all members, as does leaving it before the last tensor.

    Args:
        group: group of which this process is not rank 0.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: at any point: a member died, failed or was too slow. The tensors
            received so far must not be used.
    """
    _require_member(group, sends=False)
    header = group.receive_header()
    version, tensors = header["version"], iter_received(group)
    try:
        yield version, tensors
    except BaseException as error:
        tensors.close()  # the traceback would keep its calls, and they the connections
        is_ours = isinstance(error, WeightSyncError)
        group.fail(str(error) if is_ours else f"it could not take version {version}: {error!r}")
        raise
    if next(tensors, None) is not None:
        raise group.fail(f"it did not take all tensors of version {version}")
    group.barrier()


def receive_into(state: Mapping[str, torch.Tensor], group: WeightGroup) -> int:
    """Receive a broadcast and copy its tensors into ``state``.

    Args:
        state: tensors of the trainer's names and shapes, on any device; dtypes are converted. A
            tensor that is tied to a received one need not be sent.
        group: group of which this process is not rank 0.

    Returns:
        The version: the trainer's step.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: as :func:`receive_weights`, or names or shapes differ, a tensor cannot be
            filled, or two that are tied in ``state`` are not equal; this fails the broadcast for
            all members. ``state`` is then partly overwritten.
    """
    written: dict[int, int] = {}
    """Bytes that were written from an address on."""
    with receive_weights(group) as (version, tensors):
        for name, tensor in state.items():
            if problem := find_fault(tensor, whole=True):
                raise WeightSyncError(f"{name} {problem}")
        for name, tensor in tensors:
            target = state.get(name)
            if target is None or target.shape != tensor.shape:
                here = "unknown" if target is None else f"{list(target.shape)}"
                raise WeightSyncError(
                    f"tensor {name!r} is {list(tensor.shape)} at the trainer and {here} here; load "
                    "the same model on both sides"
                )
            start, nbytes = target.data_ptr(), target.nbytes
            if written.get(start) == nbytes and not have_equal_bits(target, tensor.to(target)):
                raise WeightSyncError(
                    f"tensor {name!r} is tied to another one here, and not equal to it at the "
                    "trainer; load the same model on both sides"
                )
            target.detach().copy_(tensor)
            written[start] = max(nbytes, written.get(start, 0))
        missing = [n for n, t in state.items() if t.nbytes > written.get(t.data_ptr(), 0)]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(state)} tensors were not sent, {missing[0]!r} first; load "
                "the same model on both sides"
            )
    return version


def _require_member(group: WeightGroup, *, sends: bool) -> None:
    if not isinstance(group, WeightGroup):
        raise ConfigError(
            f"a {type(group).__name__} is no weight group; pass what WeightGroupHost.join or "
            "join_weight_group returned"
        )
    if sends != (group.rank == 0):
        raise ConfigError(
            f"this is rank {group.rank} of a weight group, of which rank 0 sends weights and all "
            "others receive them"
        )
