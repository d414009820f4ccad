"""Broadcast of a trainer's full weights to all members of a process group, over gloo or NCCL."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import GEN_CREATED, getgeneratorstate
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.broadcast_protocol import (
    ABORT,
    ALIGNMENT,
    BEGIN,
    BUCKET,
    END,
    Named,
    compute_checksum,
    fold_checksums,
    iter_outgoing,
    iter_received,
    post_receive,
    read_message,
    start_message,
)
from trinity_sync.weights.weight_group import WeightGroup, wrap_process_group

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 600.0
"""Seconds for a broadcast in one of torch's own groups, which do not tell their time-out."""


def send_weights(
    params: Iterable[Named],
    group: "WeightGroup | dist.ProcessGroup",
    *,
    version: int,
    bucket_bytes: int = BUCKET_BYTES,
    checksum: bool | None = None,
) -> int:
    """Send every tensor once, and wait until all members have confirmed that they have them all.

    Args:
        params: names and dense tensors, on any device. A tensor that was yielded may be deleted but
            not changed until this returns; up to two buckets of tensors are kept.
        group: group of which this process is rank 0.
        version: the trainer's step, which is sent to the receivers.
        bucket_bytes: bytes that are sent at a time; each side keeps two buckets.
        checksum: compare a checksum of each bucket; by default on GPUs only.

    Returns:
        Number of bytes sent, without messages.

    Raises:
        ConfigError: this is not rank 0, or a tensor is sharded or was changed before it was sent.
        WeightSyncError: a member died, failed or was too slow. No member may use this version.
        Exception: as ``params`` raised it; receivers raise a :class:`WeightSyncError` that has it.
    """
    members = wrap_process_group(group, TIMEOUT_S)
    if members.rank != 0 or bucket_bytes < ALIGNMENT:
        raise ConfigError(
            f"rank {members.rank} cannot send weights in buckets of {bucket_bytes} bytes; rank 0 "
            "of a weight group sends, and a bucket has some MiB"
        )
    checksum = members.device.type == "cuda" if checksum is None else checksum
    sums: list[torch.Tensor] = []
    count = total = 0
    is_torn, in_flight = False, list[Any]()
    try:
        in_flight = start_message(members, BEGIN, version=index(version), checksum=checksum)
        for bucket in iter_outgoing(params, members, bucket_bytes):
            parts = bucket.get_parts()
            body = {"tensors": bucket.records, "parts": bucket.places, "nbytes": bucket.nbytes}
            is_torn = True
            works = start_message(members, BUCKET, **body, sum=fold_checksums(sums))
            works += map(members.broadcast, parts)
            is_torn = False
            sums = [*map(compute_checksum, parts)] if checksum else []
            members.wait(in_flight)
            in_flight = works
            count += len(bucket.records)
            total += sum(size for *_, size in bucket.records)
        members.wait(in_flight)
        members.wait(
            start_message(members, END, count=count, total=total, sum=fold_checksums(sums))
        )
        members.barrier()
    except BaseException as error:
        if members.broken:  # the others know already
            raise
        reason = f"the trainer gave up after {count} tensors of version {version}: {error!r}"
        if not is_torn:  # otherwise the receivers wait for a part, not for a message
            with suppress(Exception):  # the first error is the one to raise
                members.wait([*in_flight, *start_message(members, ABORT, reason=reason)])
        members.fail(reason)
        raise
    return total


class WeightStream:
    """The tensors of one broadcast, in the order in which they are sent; see `receive_weights`.

    ``version`` is the trainer's step. ``on_complete`` is called once all tensors were received,
    before this member confirms that.
    """

    def __init__(self, group: WeightGroup, on_complete: Callable[[], None]) -> None:
        if group.rank == 0:
            raise ConfigError("rank 0 of a weight group sends weights; the others receive them")
        self._group, self._on_complete = group, on_complete
        try:
            _, body = read_message(group, post_receive(group), BEGIN)
        except WeightSyncError as error:
            group.fail(str(error))
            raise
        self.version: int = body["version"]
        self._tensors = self._iter_tensors(body["checksum"])

    def __iter__(self) -> Iterator[Named]:
        return self._tensors

    def close(self) -> None:
        """Skip the remaining tensors; the broadcast then fails for all members."""
        if getgeneratorstate(self._tensors) == GEN_CREATED:  # closing it would run no code
            self._group.fail(f"it took nothing of version {self.version}")
        self._tensors.close()

    def _iter_tensors(self, checksum: bool) -> Generator[Named, None, None]:
        group, count = self._group, 0
        try:
            for named in iter_received(group, checksum):
                count += 1
                yield named
            self._on_complete()
            group.barrier()
        except WeightSyncError as error:
            group.fail(str(error))
            raise
        except GeneratorExit:
            group.fail(f"it took {count} tensors of version {self.version} and no more")
            raise
        except BaseException as error:
            group.fail(f"it could not take version {self.version}: {error!r}")
            raise


def receive_weights(group: "WeightGroup | dist.ProcessGroup") -> WeightStream:
    """Wait for rank 0 to begin a broadcast, and return its tensors as they arrive.

    Iterating yields the name and the tensor of each parameter. A tensor is in a buffer on the
    group's device, and valid until the next one is requested. ``version`` is complete, and all
    members know so, only once the iteration has ended by itself. To stop earlier, call ``close()``.

    Args:
        group: group of which this process is not rank 0.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: here or while iterating: a member died, failed or was too slow, or data was
            altered in transit. The tensors received so far must not be used.
    """
    return WeightStream(wrap_process_group(group, TIMEOUT_S), lambda: None)


def receive_into(
    state: Mapping[str, torch.Tensor], group: "WeightGroup | dist.ProcessGroup"
) -> int:
    """Receive a broadcast and copy its tensors into ``state``.

    Args:
        state: tensors of the trainer's names and shapes, on any device; dtypes are converted. A
            tensor that is tied to a received one need not be sent.
        group: group of which this process is not rank 0.

    Returns:
        The version: the trainer's step.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: as :func:`receive_weights`, or names or shapes differ, which fails the
            broadcast for all members. ``state`` is then partly overwritten.
    """
    written: set[int] = set()

    def require_all() -> None:
        missing = [n for n, t in state.items() if t.numel() and t.data_ptr() not in written]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(state)} tensors were not sent, {missing[0]!r} first; load "
                "the same model on both sides"
            )

    members = wrap_process_group(group, TIMEOUT_S)
    stream = WeightStream(members, require_all)
    try:
        for name, tensor in stream:
            target = state.get(name)
            if target is None or target.shape != tensor.shape:
                here = "unknown" if target is None else f"{list(target.shape)}"
                raise WeightSyncError(
                    f"tensor {name!r} is {list(tensor.shape)} at the trainer and {here} here; load "
                    "the same model on both sides"
                )
            target.detach().copy_(tensor)
            written.add(target.data_ptr())
    except BaseException as error:
        is_ours = isinstance(error, WeightSyncError)
        members.fail(str(error) if is_ours else f"it could not take a tensor: {error!r}")
        stream.close()
        raise
    return stream.version
