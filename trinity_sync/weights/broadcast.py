"""A trainer's whole weights, sent once to all who want them, over gloo or NCCL.

A broadcast is: an opening frame (version, size of a bucket), buckets, a closing frame (tensors and
bytes in all), and a round in which every member says that it has it all. Before each bucket come
its tensors' names, dtypes and shapes and a checksum, not before the first: the trainer gathers one
tensor at a time, and can say at each bucket that it has to give up.

Small tensors are packed, two buckets in turn: one is filled, or read, while the other is under way.
A tensor that is larger than a bucket travels from its own memory.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.group import WeightGroup, weight_group_of

BUCKET = 4 << 20
"""Fits a core's share of the cache: 4 MiB took 1.3 times the bytes alone, 16 MiB 1.5, 64 MiB 2.1,
medians of 7 over loopback, 256 MiB on two busy cores."""
TIMEOUT_S = 600.0
"""Of torch's own groups, which do not tell theirs."""
ALIGNED = 16
OPENING, FILLED, CLOSING, GIVEN_UP = 0x7269_6E31, 0x7269_6E32, 0x7269_6E33, 0x7269_6E34

Params = Iterable[tuple[str, torch.Tensor]]


def send_weights(
    params: Params,
    group: "WeightGroup | dist.ProcessGroup",
    *,
    version: int,
    bucket_bytes: int = BUCKET,
) -> int:
    """Send every tensor once; returns when all members have confirmed that they have them all.

    Args:
        params: names and dense tensors, on any device. A tensor is read before the next is asked
            for, so one may be made at a time.
        group: this process is its rank 0.
        version: the trainer's step, which receivers are told.
        bucket_bytes: how much travels at once; two of them are held on each side.

    Returns:
        Bytes that were sent.

    Raises:
        ConfigError: this is not rank 0, or a tensor is sharded.
        WeightSyncError: a member died, gave up or was too slow. Nobody may use this version.
        Exception: what ``params`` raised; receivers get a :class:`WeightSyncError` that says so.
    """
    members = weight_group_of(group, TIMEOUT_S)
    if members.rank != 0 or bucket_bytes < ALIGNED:
        raise ConfigError(
            f"rank {members.rank} cannot send weights in buckets of {bucket_bytes} bytes; rank 0 "
            "of a weight group sends, and a bucket holds some MiB"
        )
    under_way: list[Any] = []
    count = total = 0
    try:
        members.wait(_frame(members, OPENING, version, bucket_bytes))
        for records, payload in _packed(params, members, bucket_bytes):
            header = json.dumps({"tensors": records, "sum": _checksum(payload)}).encode()
            members.wait(under_way)
            under_way = _message(members, FILLED, header, len(payload))
            if len(payload):
                under_way.append(members.broadcast(payload))
            count, total = count + len(records), total + sum(size for *_, size in records)
            if len(payload) > bucket_bytes:
                members.wait(under_way)  # it is the caller's memory
                under_way = []
        members.wait(under_way)
        members.wait(_frame(members, CLOSING, count, total))
        members.confirm()
    except WeightSyncError:
        raise
    except BaseException as error:
        reason = f"the trainer gave up after {count} tensors of version {version}: {error!r}"
        members.wait(under_way)
        members.wait(_message(members, GIVEN_UP, reason.encode(), 0))
        members.fail(reason)
        raise
    return total


class Incoming:
    """The tensors of one broadcast, in the order in which they were sent; see receive_weights."""

    def __init__(self, group: WeightGroup, complete: Callable[[], None]) -> None:
        if group.rank == 0:
            raise ConfigError("rank 0 of a weight group sends weights; the others receive them")
        self._group, self._complete = group, complete
        _, self.version, _ = _next_frame(group, OPENING)
        self._tensors = self._received()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def close(self) -> None:
        """Give up what has not been taken yet, so that nobody waits for this reader."""
        self._tensors.close()

    def _received(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        group, count, total = self._group, 0, 0
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as thread:
            try:
                which, coming = 0, thread.submit(_next_bucket, group, 0, _stream(group))
                while isinstance(bucket := coming.result(), _Bucket):
                    which = 1 - which
                    coming = thread.submit(_next_bucket, group, which, _stream(group))
                    for name, tensor in bucket.tensors():
                        count, total = count + 1, total + tensor.nbytes
                        yield name, tensor
                if bucket != (count, total):
                    raise WeightSyncError(
                        f"{(count, total)} tensors and bytes came of {bucket} that were sent"
                    )
                self._complete()
                group.confirm()
            except WeightSyncError as error:
                group.fail(str(error))
                raise
            except GeneratorExit:
                group.fail(f"it took {count} tensors of version {self.version} and no more")
                raise
            except BaseException as error:
                group.fail(f"it could not take version {self.version}: {error!r}")
                raise


def receive_weights(group: "WeightGroup | dist.ProcessGroup") -> Incoming:
    """Take part in a broadcast; returns when rank 0 begins one.

    Iterating gives the name and the tensor of each one that was sent. The tensor lies in a buffer,
    on the group's device, and is valid until the next one is asked for. Only when the iteration has
    ended by itself are all of ``version`` there, and all members know of each other that they have
    it. Who stops before calls ``close()``.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: here or while iterating: a member died, gave up or was too slow, or what
            came is not what was sent. What was taken so far is of no use.
    """
    return Incoming(weight_group_of(group, TIMEOUT_S), _nothing)


def receive_into(
    state: Mapping[str, torch.Tensor], group: "WeightGroup | dist.ProcessGroup"
) -> int:
    """Take part in a broadcast and copy it into ``state``; returns the version.

    Args:
        state: tensors of the same names and shapes, on any device; another dtype is converted to.
            What is tied to a tensor that came may stay without one of its own.
        group: this process is not its rank 0.

    Raises:
        ConfigError: this is rank 0.
        WeightSyncError: as :func:`receive_weights`, and where names or shapes differ, which all
            members learn. ``state`` is then partly overwritten.
    """
    written: set[int] = set()

    def complete() -> None:
        left = [n for n, t in state.items() if t.numel() and t.data_ptr() not in written]
        if left:
            raise WeightSyncError(
                f"{len(left)} of {len(state)} tensors did not come, {left[0]!r} first; load the "
                "same model on both sides"
            )

    members = weight_group_of(group, TIMEOUT_S)
    incoming = Incoming(members, complete)
    try:
        for name, tensor in incoming:
            target = state.get(name)
            if target is None or target.shape != tensor.shape:
                here = "unknown" if target is None else f"{list(target.shape)}"
                raise WeightSyncError(
                    f"tensor {name!r} is {list(tensor.shape)} at the trainer and {here} here; load "
                    "the same model on both sides"
                )
            target.detach().copy_(tensor)
            written.add(target.data_ptr())
    except WeightSyncError as error:
        members.fail(str(error))
        incoming.close()
        raise
    return incoming.version


@dataclass(frozen=True)
class _Bucket:
    records: list[Any]
    payload: torch.Tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        at = 0
        for name, dtype, shape, size in self.records:
            flat = self.payload[at : at + size] if size else self.payload.new_empty(0)
            yield name, flat.view(getattr(torch, dtype)).reshape(shape)
            at += _room(size)


def _packed(
    params: Params, group: WeightGroup, bucket_bytes: int
) -> Iterator[tuple[list[Any], torch.Tensor]]:
    """Records and bytes, bucket by bucket; one stays as it is until the next but one."""
    which, filled, records = 0, 0, list[Any]()
    for name, tensor in params:
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(f"tensor {name!r} is sharded; send its full_tensor()")
        flat = tensor.detach().to(group.device).contiguous().reshape(-1).view(torch.uint8)
        record = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(flat)]
        room = _room(len(flat))
        if records and filled + room > bucket_bytes:
            yield records, group.buffer(which, bucket_bytes)[:filled]
            which, filled, records = 1 - which, 0, []
        if room > bucket_bytes:
            yield [record], flat
            continue
        group.buffer(which, bucket_bytes)[filled : filled + len(flat)].copy_(flat)
        filled += room
        records.append(record)
    if records:
        yield records, group.buffer(which, bucket_bytes)[:filled]


def _next_bucket(
    group: WeightGroup, which: int, stream: "AbstractContextManager[Any]"
) -> "_Bucket | tuple[int, int]":
    """The next bucket, or, where there are no more, how many tensors and bytes there were."""
    with stream:
        kind, first, second = _next_frame(group, FILLED, CLOSING)
        if kind == CLOSING:
            return first, second
        header = json.loads(_bytes(group, first))
        payload = group.buffer(which, second)[:second]
        if second:
            group.wait([group.broadcast(payload)])
        if _checksum(payload) != header["sum"]:
            raise WeightSyncError("a bucket was altered on its way; send the weights again")
        return _Bucket(header["tensors"], payload)


def _next_frame(group: WeightGroup, *kinds: int) -> tuple[int, int, int]:
    frame = torch.zeros(3, dtype=torch.int64, device=group.device)
    group.wait([group.broadcast(frame)])
    kind, first, second = frame.tolist()
    if kind == GIVEN_UP:
        raise WeightSyncError(_bytes(group, first).decode())
    if kind not in kinds:
        raise WeightSyncError(
            "what came is no part of a broadcast of weights; use the group for nothing else, and "
            "the same version of trinity_sync on both sides"
        )
    return kind, first, second


def _bytes(group: WeightGroup, count: int) -> bytes:
    header = torch.empty(count, dtype=torch.uint8, device=group.device)
    group.wait([group.broadcast(header)])
    return header.cpu().numpy().tobytes()


def _message(group: WeightGroup, kind: int, header: bytes, nbytes: int) -> list[Any]:
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device)
    return [*_frame(group, kind, len(header), nbytes), group.broadcast(text)]


def _frame(group: WeightGroup, kind: int, first: int, second: int) -> list[Any]:
    return [group.broadcast(torch.tensor([kind, first, second], device=group.device))]


def _checksum(payload: torch.Tensor) -> int:
    """A sum of all bits, which costs a GPU nothing and a CPU less than a copy."""
    if payload.storage_offset() % 8:  # a view of a part, which words cannot look at
        payload = payload.clone()
    whole = len(payload) // 8 * 8
    words, rest = payload[:whole].view(torch.int64), payload[whole:]
    return int(words.sum().item() + rest.sum().item())


def _stream(group: WeightGroup) -> "AbstractContextManager[Any]":
    """Makes another thread work in this one's order on a GPU."""
    if group.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(group.device))


def _room(size: int) -> int:
    return -size % ALIGNED + size


def _nothing() -> None:
    pass
