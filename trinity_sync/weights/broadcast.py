"""Broadcast of a trainer's full weights to all members of a process group, over gloo or NCCL.

A broadcast consists of a begin message (version), buckets, an end message (numbers of tensors and
bytes), and a barrier. Before each bucket a message has the names, dtypes and shapes of its tensors:
the trainer gathers one tensor at a time, and can abort before each bucket.

A bucket is a buffer into which many tensors are copied, or a larger tensor itself; two buffers
alternate, one being filled, or read, while the other is in flight. A receiver posts the receives of
a bucket and of the message after it at once.

On GPUs both sides compute a checksum of each bucket, which costs nothing there: the next message
has the sender's, and a receiver yields no tensor before the two were compared. On CPUs a checksum
costs a quarter of the broadcast, and TCP has its own.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import GEN_CREATED, getgeneratorstate
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.weight_group import WeightGroup, wrap_process_group

ALIGNMENT = 16
MESSAGE_BYTES = 8192
"""Bytes of a message; the rest of a longer message, for very many tensors, follows it."""
BEGIN, BUCKET, END, ABORT = 0x7269_6E39, 0x7269_6E3A, 0x7269_6E3B, 0x7269_6E3C

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


def iter_received(group: WeightGroup, checksum: bool) -> Iterator[Named]:
    """Yield names and tensors as they arrive, which are views of buffers.

    A bucket is yielded once the receives of the next one are posted, in the other of two buffers.

    Raises:
        WeightSyncError: a member died, failed or did not send in time, a checksum differs, or not
            all that was sent has arrived.
    """
    index = count = total = 0
    previous: Iterable[Named] = ()
    kind, body = read_message(group, post_receive(group), BUCKET, END)
    while kind == BUCKET:
        payload = group.get_buffer(index, body["nbytes"])[: body["nbytes"]]
        works = _start_bucket(group, payload)
        posted = post_receive(group)
        yield from previous
        group.wait(works)
        expected = compute_checksum(payload) if checksum else 0
        index, previous = 1 - index, _iter_tensors(body["tensors"], payload)
        count += len(body["tensors"])
        total += sum(size for *_, size in body["tensors"])
        kind, body = read_message(group, posted, BUCKET, END)
        if body["sum"] != int(expected):
            raise WeightSyncError("a bucket was altered in transit; send the weights again")
    yield from previous
    if (count, total) != (body["count"], body["total"]):
        raise WeightSyncError(
            f"received {(count, total)} tensors and bytes of {(body['count'], body['total'])} that "
            "were sent; send the weights again"
        )


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


def start_message(group: WeightGroup, kind: int, **body: Any) -> list[Any]:
    """Start to send a message with JSON values; return the works to wait for."""
    text = json.dumps(body).encode()
    head = bytearray(kind.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text)
    head += bytes(max(0, MESSAGE_BYTES - len(head)))
    message = torch.frombuffer(head, dtype=torch.uint8).to(group.device)
    pieces = (message[:MESSAGE_BYTES], message[MESSAGE_BYTES:])
    return [group.broadcast(piece) for piece in pieces if len(piece)]


def post_receive(group: WeightGroup) -> tuple[torch.Tensor, Any]:
    """Post the receive of the next message; return its buffer and the work."""
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=group.device)
    return message, group.broadcast(message)


def read_message(
    group: WeightGroup, posted: tuple[torch.Tensor, Any], *kinds: int
) -> tuple[int, dict[str, Any]]:
    """Wait for a message whose receive `post_receive` has posted; return its kind and body.

    Raises:
        WeightSyncError: the sender aborted, or sent something else.
    """
    message, work = posted
    group.wait([work])
    head = message.cpu().numpy().tobytes()
    kind, size = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8))
    if kind not in (*kinds, ABORT):
        raise WeightSyncError(
            "what was received is no part of a broadcast of weights; use the group for nothing "
            "else, and the same version of trinity_sync on both sides"
        )
    if size > MESSAGE_BYTES - 16:
        rest = torch.empty(size + 16 - MESSAGE_BYTES, dtype=torch.uint8, device=group.device)
        group.wait([group.broadcast(rest)])
        head += rest.cpu().numpy().tobytes()
    body = json.loads(head[16 : 16 + size])
    if kind == ABORT:
        raise WeightSyncError(body["reason"])
    return kind, body


def compute_checksum(bucket: torch.Tensor) -> torch.Tensor:
    """Return the sum of all bits, which costs a GPU nothing and a CPU less than a copy."""
    if bucket.storage_offset() % 8:  # not aligned to 64-bit words
        bucket = bucket.clone()
    words = len(bucket) // 8 * 8
    return bucket[:words].view(torch.int64).sum() + bucket[words:].sum()


def _align(size: int) -> int:
    return -size % ALIGNMENT + size


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
        params: names and dense tensors, on any device. A tensor may be changed or deleted once the
            next one is requested.
        group: group of which this process is rank 0.
        version: the trainer's step, which is sent to the receivers.
        bucket_bytes: bytes that are sent at a time, unless a tensor is larger; each side keeps two
            buckets.
        checksum: compare a checksum of each bucket; by default on GPUs only.

    Returns:
        Number of bytes sent, without messages.

    Raises:
        ConfigError: this is not rank 0, or a tensor is sharded.
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
    previous: torch.Tensor | int = 0
    """Checksum of the bucket sent last."""
    count = total = 0
    is_torn, in_flight = False, list[Any]()
    try:
        in_flight = start_message(members, BEGIN, version=index(version), checksum=checksum)
        for bucket, records in iter_buckets(params, members, bucket_bytes):
            is_torn = True
            body = {"tensors": records, "nbytes": len(bucket), "sum": int(previous)}
            works = start_message(members, BUCKET, **body)
            works += _start_bucket(members, bucket)
            is_torn = False
            previous = compute_checksum(bucket) if checksum else 0
            members.wait(in_flight)
            in_flight = works
            if len(bucket) > bucket_bytes:  # a tensor's own memory, which may change now
                members.wait(in_flight)
                in_flight = []
            count += len(records)
            total += sum(size for *_, size in records)
        members.wait(in_flight)
        members.wait(start_message(members, END, count=count, total=total, sum=int(previous)))
        members.barrier()
    except BaseException as error:
        if members.broken:  # the others know already
            raise
        reason = f"the trainer gave up after {count} tensors of version {version}: {error!r}"
        if not is_torn:  # otherwise the receivers wait for a bucket, not for a message
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
