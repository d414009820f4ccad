"""A process group that sends weights from the trainer's rank 0 to all other members.

A failed broadcast does not tell which member failed. So a member that notices the failure writes it
to the store of the group, closes its connections, and waits for the other members to do the same:
the error names those that stay silent. Three quarters of the time-out are for the broadcast, the
rest for this roll call.
"""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.snapshot.torch_private import get_group_devices

BROADCAST_FRACTION = 0.75
"""Part of the time-out that a broadcast may take; the rest is for the roll call."""
WORK_POLL_S, STORE_POLL_S = 0.001, 1.0
"""Seconds between two polls for the end of an NCCL call, as in torch, and for failed members."""


class WeightGroup:
    """Process group in which rank 0 sends weights and all other ranks receive them.

    Made by `WeightGroupHost.join`, `join_weight_group` and `wrap_process_group`. One call at a
    time: all members send or receive the same version. After an error the group is broken: each
    call raises, and all members have to join a new one.

    ``store`` is None for a group of torch's. A broadcast and the roll call after its failure take
    at most ``timeout_s``. An ``owned`` backend is aborted when the group breaks or is closed. A
    ``watched`` backend does not notice failed members, so the store is polled while waiting.
    """

    def __init__(
        self,
        backend: Any,
        store: Store | None,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        owned: bool = True,
        watched: bool = False,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.timeout_s = timeout_s
        self._backend, self._store, self._owned = backend, store, owned
        self._watched = watched
        self._limit = timedelta(seconds=timeout_s * BROADCAST_FRACTION)
        self._broken: str | None = None
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def broken(self) -> bool:
        """Whether the group was closed or has failed, and cannot be used again."""
        return self._broken is not None

    def close(self) -> None:
        """Leave the group; later calls raise, except this one."""
        if not self.broken:
            self._broken = "it was closed"
        self._buffers.clear()
        self._abort()
        self._backend = self._store = None

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to send ``tensor`` from rank 0, or to receive it; return the work for `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._limit
        return self._start("broadcast", tensor, options)

    def wait(self, works: Iterable[Any]) -> None:
        """Wait for works that `broadcast` returned.

        Raises:
            WeightSyncError: a member died, failed or did not take part in time.
        """
        for work in works:
            try:
                if self._watched and self._store is not None:
                    self._poll(work, self._store)
                work.wait(self._limit)
            except RuntimeError as error:
                raise self.fail(first_line(error)) from error

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            WeightSyncError: a member did not in time.
        """
        present = torch.ones(1, dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        self.wait([self._start("allreduce", present, options)])

    def get_buffer(self, index: int, nbytes: int) -> torch.Tensor:
        """Return a buffer that is kept from one broadcast to the next.

        It is ``uint8`` on the group's device, of at least ``nbytes``.
        """
        found = self._buffers.get(index)
        if found is None or len(found) < nbytes:
            self._buffers.pop(index, None)
            found = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._buffers[index] = found
        return found

    def fail(self, reason: str) -> WeightSyncError:
        """Leave the group after a failure; return an error that names the silent members."""
        if not self.broken:
            self._broken = f"it failed: {reason}"
            answers = self._roll_call(reason)
            self._broken += answers
            return WeightSyncError(
                f"rank {self.rank} of {self.world_size} of the weight group: {reason}{answers}; "
                "the weights did not arrive, join a new group and send them again"
            )
        return self._broken_error()

    def _poll(self, work: Any, store: Store) -> None:
        """Wait until the work or another member has ended: NCCL does not notice the latter."""
        began = checked = time.monotonic()
        while not work.is_completed() and checked < began + self._limit.total_seconds():
            time.sleep(WORK_POLL_S)
            if time.monotonic() < checked + STORE_POLL_S:
                continue
            checked = time.monotonic()
            if any(store.check([f"gave up/{rank}"]) for rank in range(self.world_size)):
                raise RuntimeError("another member gave up")

    def _start(self, operation: str, tensor: torch.Tensor, options: Any) -> Any:
        if self.broken:
            raise self._broken_error()
        try:
            return getattr(self._backend, operation)([tensor], options)
        except RuntimeError as error:
            raise self.fail(first_line(error)) from error

    def _broken_error(self) -> WeightSyncError:
        return WeightSyncError(
            f"rank {self.rank} can no longer use this weight group, {self._broken}; "
            "join a new one on all sides"
        )

    def _abort(self) -> None:
        if self._owned and self._backend is not None:
            self._backend.abort()
            self._backend = None

    def _roll_call(self, reason: str) -> str:
        """Write the reason to the store; return other members' reasons, or name silent members."""
        if self._store is None:
            return ""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            self._store.set(f"gave up/{self.rank}", reason)
            self._abort()
            rest = timedelta(seconds=self.timeout_s * (1 - BROADCAST_FRACTION))
            silent = find_absent(self._store, "gave up", others, rest)
            reasons = {
                r: self._store.get(f"gave up/{r}").decode() for r in others if r not in silent
            }
            names = ", ".join(
                f"rank {rank} ({self._store.get(f'joined/{rank}').decode()})" for rank in silent
            )
        except RuntimeError:
            self._abort()
            return "; rank 0, the trainer's, is gone"
        if names:
            return f"; no answer from {names}"
        return "".join(f"; rank {rank} gave up: {why}" for rank, why in reasons.items())


def wrap_process_group(group: "WeightGroup | dist.ProcessGroup", timeout_s: float) -> WeightGroup:
    """Return a torch process group as a weight group; a weight group is returned unchanged.

    An error in torch's group names no member, and torch decides whether the group is still usable.
    A broadcast gets ``timeout_s``, since torch's groups do not tell theirs.

    Raises:
        ConfigError: ``group`` is neither.
    """
    if isinstance(group, WeightGroup):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"a {type(group).__name__} is no group to send weights to; pass a WeightGroup from "
            "join_weight_group, or a torch ProcessGroup"
        )
    on_gpu = any(device.type == "cuda" for device in get_group_devices(group))
    return WeightGroup(
        group,
        None,
        rank=group.rank(),
        world_size=group.size(),
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        timeout_s=timeout_s,
        owned=False,
    )


def find_absent(store: Store, what: str, ranks: Iterable[int], limit: timedelta) -> list[int]:
    """Return the ranks that do not write the key ``{what}/{rank}`` to the store in time."""
    keys = {rank: f"{what}/{rank}" for rank in ranks}
    try:
        store.wait(list(keys.values()), limit)
    except dist.DistStoreError:
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
