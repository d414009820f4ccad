"""A trainer's whole weights, sent once to all who want them, over gloo or NCCL.

A broadcast is: an opening message (version), buckets, a closing message (tensors and bytes in all),
and a round in which every member says that it has it all. Before each bucket come its tensors'
names, dtypes and shapes, not before the first: the trainer gathers one tensor at a time, and can
say at each bucket that it has to give up.

Small tensors are packed, two buckets in turn: one is filled, or read, while the other is under way.
A tensor that is larger than a bucket is one by itself and travels from its own memory.

Bytes travel in pieces, one being summed up while the one before is under way. What they summed up
to is in the next message, and no tensor is handed on before that one has come. A receiver asks for
all pieces of a bucket and the message after it at once.
"""

import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import GEN_CREATED, getgeneratorstate
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.group import WeightGroup, weight_group_of

BUCKET = 4 << 20
PIECES = 4
"""Buckets that a large tensor's piece is as large as: each piece costs wake-ups of four threads."""
TIMEOUT_S = 600.0
"""Of torch's own groups, which do not tell theirs."""
ALIGNED = 16
MESSAGE = 8192
"""Bytes of a message; what is longer, the records of a bucket of very many tensors, comes after it.
"""
OPENING, FILLED, CLOSING, GIVEN_UP = 0x7269_6E35, 0x7269_6E36, 0x7269_6E37, 0x7269_6E38

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
    piece_bytes = PIECES * bucket_bytes
    sums: list[torch.Tensor] = []
    count = total = 0
    torn, under_way = False, list[Any]()
    try:
        under_way = _tell(members, OPENING, version=index(version), piece=piece_bytes)
        for records, payload in _packed(params, members, bucket_bytes):
            about = {"tensors": records, "nbytes": len(payload), "sum": _folded(sums)}
            former, under_way = under_way, _tell(members, FILLED, **about)
            torn, sums = True, []
            for piece in _pieces(payload, piece_bytes):
                sums.append(_sum(piece))
                members.wait(former)
                former, under_way = under_way, [members.broadcast(piece)]
            members.wait(former)
            torn = False
            count, total = count + len(records), total + sum(size for *_, size in records)
            if len(payload) > bucket_bytes:
                members.wait(under_way)  # it is the caller's memory
        members.wait(under_way)
        members.wait(_tell(members, CLOSING, count=count, total=total, sum=_folded(sums)))
        members.confirm()
    except BaseException as error:
        if members.broken:  # the others know
            raise
        reason = f"the trainer gave up after {count} tensors of version {version}: {error!r}"
        if not torn:  # else the receivers wait for bytes
            with suppress(Exception):  # the first error is the one to be seen
                members.wait([*under_way, *_tell(members, GIVEN_UP, reason=reason)])
        members.fail(reason)
        raise
    return total


class Incoming:
    """The tensors of one broadcast, in the order in which they were sent; see receive_weights."""

    def __init__(self, group: WeightGroup, complete: Callable[[], None]) -> None:
        if group.rank == 0:
            raise ConfigError("rank 0 of a weight group sends weights; the others receive them")
        self._group, self._complete = group, complete
        try:
            _, opening = _told(group, _coming(group), OPENING)
        except WeightSyncError as error:
            group.fail(str(error))
            raise
        self.version: int = opening["version"]
        self._tensors = self._received(opening["piece"])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def close(self) -> None:
        """Give up what has not been taken yet, so that nobody waits for this reader."""
        if getgeneratorstate(self._tensors) == GEN_CREATED:  # closing it would run none of it
            self._group.fail(f"it took nothing of version {self.version}")
        self._tensors.close()

    def _received(self, piece: int) -> Generator[tuple[str, torch.Tensor], None, None]:
        group, count, total = self._group, 0, 0
        try:
            for bucket in _buckets(group, piece):
                if isinstance(bucket, tuple):
                    break
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
    except BaseException as error:
        ours = isinstance(error, WeightSyncError)
        members.fail(str(error) if ours else f"it could not take a tensor: {error!r}")
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


def _buckets(group: WeightGroup, piece: int) -> "Iterator[_Bucket | tuple[int, int]]":
    """Bucket by bucket, and after the last how many tensors and bytes were sent.

    A bucket is given when the next one has been asked for, so the two are in turn in two buffers.
    """
    which, former = 0, None
    kind, about = _told(group, _coming(group), FILLED, CLOSING)
    while kind == FILLED:
        payload = group.buffer(which, about["nbytes"])[: about["nbytes"]]
        pieces = [(part, group.broadcast(part)) for part in _pieces(payload, piece)]
        coming = _coming(group)
        if former:
            yield former
        sums = []
        for part, work in pieces:
            group.wait([work])
            sums.append(_sum(part))
        which, former = 1 - which, _Bucket(about["tensors"], payload)
        kind, about = _told(group, coming, FILLED, CLOSING)
        if about["sum"] != _folded(sums):
            raise WeightSyncError("a bucket was altered on its way; send the weights again")
    if former:
        yield former
    yield about["count"], about["total"]


def _pieces(payload: torch.Tensor, size: int) -> list[torch.Tensor]:
    """What travels at once: on a GPU all of it, which has no cache to be summed up in."""
    size = len(payload) if payload.is_cuda else size // ALIGNED * ALIGNED
    return [payload[at : at + size] for at in range(0, len(payload), size or 1)]


def _tell(group: WeightGroup, kind: int, **about: Any) -> list[Any]:
    """Begin to send a message; the works to wait for."""
    text = json.dumps(about).encode()
    head = bytearray(kind.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text)
    head += bytes(max(0, MESSAGE - len(head)))
    whole = torch.frombuffer(head, dtype=torch.uint8).to(group.device)
    return [group.broadcast(part) for part in (whole[:MESSAGE], whole[MESSAGE:]) if len(part)]


def _coming(group: WeightGroup) -> tuple[torch.Tensor, Any]:
    """Ask for the next message, which may take its time."""
    message = torch.zeros(MESSAGE, dtype=torch.uint8, device=group.device)
    return message, group.broadcast(message)


def _told(
    group: WeightGroup, coming: tuple[torch.Tensor, Any], *kinds: int
) -> tuple[int, dict[str, Any]]:
    """The kind of a message and what it says, once it has come."""
    message, work = coming
    group.wait([work])
    head = message.cpu().numpy().tobytes()
    kind, size = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8))
    if kind not in (*kinds, GIVEN_UP):
        raise WeightSyncError(
            "what came is no part of a broadcast of weights; use the group for nothing else, and "
            "the same version of trinity_sync on both sides"
        )
    if size > MESSAGE - 16:
        rest = torch.empty(size + 16 - MESSAGE, dtype=torch.uint8, device=group.device)
        group.wait([group.broadcast(rest)])
        head += rest.cpu().numpy().tobytes()
    about = json.loads(head[16 : 16 + size])
    if kind == GIVEN_UP:
        raise WeightSyncError(about["reason"])
    return kind, about


def _sum(piece: torch.Tensor) -> torch.Tensor:
    """A sum of all bits, which costs a GPU nothing and a CPU less than a copy."""
    if piece.storage_offset() % 8:  # a view of a part, which words cannot look at
        piece = piece.clone()
    whole = len(piece) // 8 * 8
    return piece[:whole].view(torch.int64).sum() + piece[whole:].sum()


def _folded(sums: list[torch.Tensor]) -> int:
    """One number of the sums of a bucket's pieces, in their order."""
    return functools.reduce(lambda so_far, each: (31 * so_far + int(each)) % 2**61, sums, 0)


def _room(size: int) -> int:
    return -size % ALIGNED + size


def _nothing() -> None:
    pass
