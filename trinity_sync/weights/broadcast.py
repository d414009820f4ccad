"""Broadcast of a trainer's full weights to all members of a process group, over gloo or NCCL.

A broadcast consists of a begin message (version), buckets, an end message (numbers of tensors and
bytes), and a barrier. Before each bucket a message has the names, dtypes and shapes of its tensors:
the trainer gathers one tensor at a time, and can abort before each bucket.

A bucket has many tensors, or a single larger one; two buffers alternate, one being filled, or read,
while the other is in flight. Small tensors are packed, others are sent from their own memory. A
receiver posts the receives of all parts of a bucket and of the message after it at once.

On GPUs both sides compute a checksum of each bucket, which costs nothing there: the next message
has the sender's, and a receiver yields no tensor before the two were compared. On CPUs a checksum
costs a quarter of the broadcast, and TCP has its own.
"""

import functools
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import GEN_CREATED, getgeneratorstate
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.tensors.torch_private import get_change_count
from trinity_sync.weights.weight_group import WeightGroup, wrap_process_group

PACKED_FRACTION = 64
"""Part of a bucket up to which a tensor is copied into it: copying more costs more than a message
of its own, which wakes four threads."""
ALIGNMENT = 16
MESSAGE_BYTES = 8192
"""Bytes of a message; the rest of a longer message, for very many tensors, follows it."""
BEGIN, BUCKET, END, ABORT = 0x7269_6E39, 0x7269_6E3A, 0x7269_6E3B, 0x7269_6E3C

Named = tuple[str, torch.Tensor]


@dataclass
class OutgoingBucket:
    """A bucket to send; ``buffer`` has the small tensors at their places."""

    buffer: torch.Tensor
    records: list[Any] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of all tensors, alignment included."""
    places: list[list[int]] = field(default_factory=list)
    """Start and length of each part."""
    _unpacked: dict[int, tuple[str, torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    """Tensors to send by the number of their part: name, tensor, its bytes and its change count."""

    def add(self, name: str, tensor: torch.Tensor, flat: torch.Tensor, packed_bytes: int) -> None:
        """Add a tensor, whose bytes are ``flat``, ``uint8`` of shape ``[nbytes]``.

        A tensor of at most ``packed_bytes`` is copied into the buffer; a larger one is sent from
        its own memory, and may not change until then.
        """
        size, at = len(flat), self.nbytes
        self.records.append(
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size)
        )
        self.nbytes = at + _align(size)
        if size > packed_bytes:
            self._unpacked[len(self.places)] = name, tensor, flat, _count_changes(tensor)
            self.places.append([at, size])
        elif size:
            self.buffer[at : at + size].copy_(flat)
            if self.places and len(self.places) - 1 not in self._unpacked:  # extends that part
                self.places[-1][1] = at + size - self.places[-1][0]
            else:
                self.places.append([at, size])

    def get_parts(self) -> list[torch.Tensor]:
        """Return the bytes to send, ``uint8`` each.

        Raises:
            ConfigError: a tensor was changed since it was added.
        """
        parts = [self.buffer[start : start + size] for start, size in self.places]
        for number, (name, tensor, flat, changes) in self._unpacked.items():
            if _count_changes(tensor) != changes:
                raise ConfigError(
                    f"tensor {name!r} was changed before it was sent; yield tensors that do not "
                    "share memory"
                )
            parts[number] = flat
        return parts


def iter_outgoing(
    params: Iterable[Named], group: WeightGroup, bucket_bytes: int
) -> Iterator[OutgoingBucket]:
    """Yield buckets of ``bucket_bytes``, or more for a single larger tensor.

    Each keeps its tensors until the second bucket after it.

    Raises:
        ConfigError: a tensor is a DTensor.
    """
    index = 0
    bucket = OutgoingBucket(group.get_buffer(index, bucket_bytes))
    in_flight = deque([bucket], maxlen=2)
    for name, tensor in params:
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(f"tensor {name!r} is sharded; send its full_tensor()")
        flat = tensor.detach().to(group.device).contiguous().reshape(-1).view(torch.uint8)
        if bucket.records and bucket.nbytes + len(flat) > bucket_bytes:
            yield bucket
            index = 1 - index
            bucket = OutgoingBucket(group.get_buffer(index, bucket_bytes))
            in_flight.append(bucket)
        bucket.add(name, tensor, flat, bucket_bytes // PACKED_FRACTION)
    if bucket.records:
        yield bucket


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
        parts = [payload[start : start + size] for start, size in body["parts"]]
        works = [*map(group.broadcast, parts)]
        posted = post_receive(group)
        yield from previous
        group.wait(works)
        sums = [*map(compute_checksum, parts)] if checksum else []
        index, previous = 1 - index, _iter_tensors(body["tensors"], payload)
        count += len(body["tensors"])
        total += sum(size for *_, size in body["tensors"])
        kind, body = read_message(group, posted, BUCKET, END)
        if body["sum"] != fold_checksums(sums):
            raise WeightSyncError("a bucket was altered in transit; send the weights again")
    yield from previous
    if (count, total) != (body["count"], body["total"]):
        raise WeightSyncError(
            f"received {(count, total)} tensors and bytes of {(body['count'], body['total'])} that "
            "were sent; send the weights again"
        )


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


def compute_checksum(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of all bits, which costs a GPU nothing and a CPU less than a copy."""
    if part.storage_offset() % 8:  # not aligned to 64-bit words
        part = part.clone()
    words = len(part) // 8 * 8
    return part[:words].view(torch.int64).sum() + part[words:].sum()


def fold_checksums(sums: list[torch.Tensor]) -> int:
    """Return one number for the checksums of a bucket's parts, in order."""
    return functools.reduce(lambda so_far, each: (31 * so_far + int(each)) % 2**61, sums, 0)


def _count_changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else get_change_count(tensor)


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
