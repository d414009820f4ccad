"""A trainer's whole weights, sent once to all who want them, over gloo or NCCL.

A broadcast is: an opening message (version), buckets, a closing message (tensors and bytes in all),
and a round in which every member says that it has it all. Before each bucket come its tensors'
names, dtypes and shapes, not before the first: the trainer gathers one tensor at a time, and can
say at each bucket that it has to give up.

A bucket is many tensors or a single larger one; two are in turn, one filled, or read, while the
other is under way. Small tensors are packed, the others travel from their own memory. A receiver
asks for all parts of a bucket and the message after it at once.

On GPUs both sides sum the bytes up, which costs nothing there: what they summed up to is in the
next message, and no tensor is handed on before that one has come. On CPUs a sum costs a quarter of
the broadcast, and TCP has its own.
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
from trinity_sync.snapshot.torch_private import get_change_count
from trinity_sync.weights.process_group import WeightGroup, weight_group_of

BUCKET = 64 << 20
PACKED = 64
"""Part of a bucket up to which a tensor is copied into it: a copy of more costs more than a message
of its own, whose wake-ups are those of four threads."""
TIMEOUT_S = 600.0
"""Of torch's own groups, which do not tell theirs."""
ALIGNED = 16
MESSAGE = 8192
"""Bytes of a message; what is longer, the records of a bucket of very many tensors, comes after it.
"""
OPENING, FILLED, CLOSING, GIVEN_UP = 0x7269_6E39, 0x7269_6E3A, 0x7269_6E3B, 0x7269_6E3C

Params = Iterable[tuple[str, torch.Tensor]]


def send_weights(
    params: Params,
    group: "WeightGroup | dist.ProcessGroup",
    *,
    version: int,
    bucket_bytes: int = BUCKET,
    checked: bool | None = None,
) -> int:
    """Send every tensor once; returns when all members have confirmed that they have them all.

    Args:
        params: names and dense tensors, on any device. Each keeps its values until this returns, or
            is let go of once it was given: up to two buckets of them are held.
        group: this process is its rank 0.
        version: the trainer's step, which receivers are told.
        bucket_bytes: how much travels at once; two of them are held on each side.
        checked: sum the bytes up on both sides; by default on GPUs.

    Returns:
        Bytes that were sent.

    Raises:
        ConfigError: this is not rank 0, or a tensor is sharded, or was changed before it was sent.
        WeightSyncError: a member died, gave up or was too slow. Nobody may use this version.
        Exception: what ``params`` raised; receivers get a :class:`WeightSyncError` that says so.
    """
    members = weight_group_of(group, TIMEOUT_S)
    if members.rank != 0 or bucket_bytes < ALIGNED:
        raise ConfigError(
            f"rank {members.rank} cannot send weights in buckets of {bucket_bytes} bytes; rank 0 "
            "of a weight group sends, and a bucket holds some MiB"
        )
    checked = members.device.type == "cuda" if checked is None else checked
    sums: list[torch.Tensor] = []
    count = total = 0
    torn, under_way = False, list[Any]()
    try:
        under_way = _tell(members, OPENING, version=index(version), checked=checked)
        for bucket in _filled(params, members, bucket_bytes):
            parts = bucket.parts()
            about = {"tensors": bucket.records, "parts": bucket.places, "nbytes": bucket.nbytes}
            torn = True
            coming = _tell(members, FILLED, **about, sum=_folded(sums))
            coming += map(members.broadcast, parts)
            torn = False
            sums = [*map(_sum, parts)] if checked else []
            members.wait(under_way)
            under_way = coming
            count += len(bucket.records)
            total += sum(size for *_, size in bucket.records)
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
        self._tensors = self._received(opening["checked"])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def close(self) -> None:
        """Give up what has not been taken yet, so that nobody waits for this reader."""
        if getgeneratorstate(self._tensors) == GEN_CREATED:  # closing it would run none of it
            self._group.fail(f"it took nothing of version {self.version}")
        self._tensors.close()

    def _received(self, checked: bool) -> Generator[tuple[str, torch.Tensor], None, None]:
        group, count, total = self._group, 0, 0
        try:
            for bucket in _buckets(group, checked):
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


@dataclass
class _Outgoing:
    """A bucket that is being filled; ``buffer`` has the small tensors in their places."""

    buffer: torch.Tensor
    records: list[Any] = field(default_factory=list)
    nbytes: int = 0
    """With what aligns the tensors."""
    places: list[list[int]] = field(default_factory=list)
    """Start and length of each part."""
    _own: list[tuple[str, torch.Tensor, torch.Tensor, int] | None] = field(default_factory=list)
    """For each part None, or the tensor that it is: name, tensor, bytes and count of changes."""

    def add(self, name: str, tensor: torch.Tensor, flat: torch.Tensor, small: int) -> None:
        """Take a tensor, of up to ``small`` bytes into the buffer."""
        size, at = len(flat), self.nbytes
        self.records.append(
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size)
        )
        self.nbytes = at + _room(size)
        if size > small:
            self.places.append([at, size])
            self._own.append((name, tensor, flat, _changes(tensor)))
        elif size:
            self.buffer[at : at + size].copy_(flat)
            if self._own and self._own[-1] is None:  # one part with those before it
                self.places[-1][1] = at + size - self.places[-1][0]
            else:
                self.places.append([at, size])
                self._own.append(None)

    def parts(self) -> list[torch.Tensor]:
        """The bytes to send.

        Raises:
            ConfigError: a tensor is not what it was when it came.
        """
        found = []
        for (start, size), own in zip(self.places, self._own, strict=True):
            if own is None:
                found.append(self.buffer[start : start + size])
                continue
            name, tensor, flat, changes = own
            if _changes(tensor) != changes:
                raise ConfigError(
                    f"tensor {name!r} was changed before it was sent; give each memory of its own"
                )
            found.append(flat)
        return found


def _changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else get_change_count(tensor)


def _filled(params: Params, group: WeightGroup, bucket_bytes: int) -> Iterator[_Outgoing]:
    """Bucket by bucket; one stays as it is, with its tensors, until the next but one."""
    which = 0
    bucket = _Outgoing(group.buffer(which, bucket_bytes))
    under_way = deque([bucket], maxlen=2)
    for name, tensor in params:
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(f"tensor {name!r} is sharded; send its full_tensor()")
        flat = tensor.detach().to(group.device).contiguous().reshape(-1).view(torch.uint8)
        if bucket.records and bucket.nbytes + len(flat) > bucket_bytes:
            yield bucket
            which = 1 - which
            bucket = _Outgoing(group.buffer(which, bucket_bytes))
            under_way.append(bucket)
        bucket.add(name, tensor, flat, bucket_bytes // PACKED)
    if bucket.records:
        yield bucket


def _buckets(group: WeightGroup, checked: bool) -> "Iterator[_Bucket | tuple[int, int]]":
    """Bucket by bucket, and after the last how many tensors and bytes were sent.

    A bucket is given when the next one has been asked for, so the two are in turn in two buffers.
    """
    which, former = 0, None
    kind, about = _told(group, _coming(group), FILLED, CLOSING)
    while kind == FILLED:
        payload = group.buffer(which, about["nbytes"])[: about["nbytes"]]
        parts = [payload[start : start + size] for start, size in about["parts"]]
        works = [*map(group.broadcast, parts)]
        coming = _coming(group)
        if former:
            yield former
        group.wait(works)
        sums = [*map(_sum, parts)] if checked else []
        which, former = 1 - which, _Bucket(about["tensors"], payload)
        kind, about = _told(group, coming, FILLED, CLOSING)
        if about["sum"] != _folded(sums):
            raise WeightSyncError("a bucket was altered on its way; send the weights again")
    if former:
        yield former
    yield about["count"], about["total"]


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
