"""A process group that sends weights from the trainer's rank 0 to all other members.

A failed broadcast does not tell why. So the first member that fails writes its reason to the store
of the group, and the errors of all members have it. What is said about the weights goes through the
store as well: only bytes of weights go through the backend.

The trainer's rank 0 and the explorers' workers are in different default groups, or in none. So the
group is made of torch's public parts without a default group: a ``TCPStore`` on rank 0, at a port
that the kernel chooses, for the rendezvous of the members, and a ``ProcessGroupGloo`` or
``ProcessGroupNCCL`` on top of it. ``torch.distributed``'s global state is neither read nor changed.

The NCCL side has not run on a GPU yet.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.tensors.torch_private import make_gloo_options, make_nccl_options

HEARD_LIMIT = timedelta(seconds=5)
"""Time for which rank 0 stays after a failure, for others to read the reason."""
WORK_POLL_S, STORE_POLL_S = 0.001, 1.0
"""Seconds between two polls for the end of a call, as in torch for NCCL, and for failed members."""


class WeightGroup:
    """Process group in which rank 0 sends weights and all other ranks receive them.

    Made by `WeightGroupHost.join` and `join_weight_group`. One call at a time: all members send or
    receive the same version. After an error the group is broken: each call raises, and all members
    have to join a new one.

    Members wait for each other at most ``timeout_s``. NCCL does not notice failed members, and gloo
    not all of them, so the store is polled while waiting.
    """

    def __init__(
        self,
        backend: Any,
        store: Store,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._backend, self._store = backend, cast(Any, store)
        self._headers = 0
        """Number of headers that were sent and read."""
        self._unread: list[str] = []
        """Keys, at rank 0, of headers that not all members have confirmed."""
        self._limit = timedelta(seconds=timeout_s)
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
        self._store = None  # rank 0's ends the connections of all others

    def send_header(self, **body: Any) -> None:
        """Send JSON values to all members, from rank 0.

        Raises:
            WeightSyncError: the group is broken.
        """
        self._require_usable()
        self._store.set(self._header_key, json.dumps(body))
        self._unread.append(self._header_key)
        self._headers += 1

    def receive_header(self) -> dict[str, Any]:
        """Wait for the next header of rank 0.

        Raises:
            WeightSyncError: rank 0 died, failed or did not send one in time.
        """
        self._require_usable()
        try:
            self._store.wait([self._header_key], self._limit)
            body: dict[str, Any] = json.loads(self._store.get(self._header_key))
        except dist.DistStoreError as error:
            seconds = self._limit.total_seconds()
            raise self.fail(f"rank 0 sent nothing for {seconds:g} s") from error
        except RuntimeError as error:
            raise self.fail(first_line(error)) from error
        if not body:
            raise self.fail("the broadcast was ended")
        self._headers += 1
        return body

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to send ``tensor`` from rank 0, or to receive it; return the work for `wait`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._start("broadcast", tensor, options)

    def wait(self, works: Iterable[Any]) -> None:
        """Wait for works that `broadcast` returned.

        Raises:
            WeightSyncError: a member died, failed or did not take part in time.
        """
        for work in works:
            try:
                self._poll(work)
                work.wait(self._limit)
            except RuntimeError as error:
                raise self.fail(first_line(error)) from error

    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            WeightSyncError: a member did not in time.
        """
        present = torch.ones(1, dtype=torch.int64, device=self.device)
        self.wait([self._start("allreduce", present, dist.AllreduceOptions())])
        while self._unread:
            self._store.delete_key(self._unread.pop())

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
        """Leave the group after a failure; return an error with the first member's reason."""
        if self.broken:
            return self._broken_error()
        found = f"rank {self.rank} gave up: {reason}"
        self._broken = f"it failed: {found}"
        try:
            found = self._store.compare_set("failed", "", found).decode()
            if self.rank == 0:  # for members that wait for a header
                self._store.set(self._header_key, "{}")
            self._abort()
            if self.rank:
                self._store.set(f"heard/{self.rank}", "")
            else:  # its process may end, and the store with it
                others = range(1, self.world_size)
                find_absent(self._store, "heard", others, min(self._limit, HEARD_LIMIT))
        except RuntimeError:
            self._abort()
            found += "; rank 0, the trainer's, is gone"
        self._broken = f"it failed: {found}"
        return WeightSyncError(
            f"rank {self.rank} of {self.world_size} of the weight group: {found}; the weights did "
            "not arrive, join a new group and send them again"
        )

    def _poll(self, work: Any) -> None:
        """Wait until the work has ended; raise if another member fails or none answers in time."""
        seconds = self._limit.total_seconds()
        deadline, checked = time.monotonic() + seconds, time.monotonic()
        while not work.is_completed():
            time.sleep(WORK_POLL_S)
            if (now := time.monotonic()) > deadline:
                raise RuntimeError(f"a member did not answer within {seconds:g} s")
            if now > checked + STORE_POLL_S:
                checked = now
                if self._store.check(["failed"]):
                    raise RuntimeError("another member gave up")

    def _start(self, operation: str, tensor: torch.Tensor, options: Any) -> Any:
        self._require_usable()
        options.timeout = 2 * self._limit  # `_poll` ends first, and says what is missing
        try:
            return getattr(self._backend, operation)([tensor], options)
        except RuntimeError as error:
            raise self.fail(first_line(error)) from error

    def _require_usable(self) -> None:
        if self.broken:
            raise self._broken_error()

    def _broken_error(self) -> WeightSyncError:
        return WeightSyncError(
            f"rank {self.rank} can no longer use this weight group, {self._broken}; "
            "join a new one on all sides"
        )

    def _abort(self) -> None:
        if self._backend is not None:
            self._backend.abort()
            last, self._backend = [self._backend], None
            # gloo's destructor waits for calls that other members will not answer
            threading.Thread(target=last.clear, daemon=True).start()

    @property
    def _header_key(self) -> str:
        return f"header/{self._headers}"


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


GLOO_THREADS = 8
"""Broadcasts in flight at a time: with torch's two, a receiver that is slow to wake up on busy
cores has posted no further receive when one ends, and 4 MiB took 1.3 times as long."""
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
"""torch's watchdog ends the process when a communicator fails, and a reader must not be able to end
the trainer. With this variable, read when the group is made, torch starts no watchdog."""


class WeightGroupHost:
    """Rank 0's side of the rendezvous of a group: the store that the other members connect to.

    It listens as soon as it is made, on a port that the kernel chooses, so no other process can
    take the port before the members know it. One host is for one group.

    Args:
        port: port to listen on; 0 for a free one.
        address: address at which the other members reach this machine; by default that of the
            network interface of the default route.

    Raises:
        WeightSyncError: the port is taken.
    """

    def __init__(self, port: int = 0, address: str | None = None) -> None:
        self.address = address or _find_own_address()
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self.address, port, None, True, wait_for_workers=False
            )
        except RuntimeError as error:
            raise WeightSyncError(
                f"rank 0 cannot listen on {self.address}:{port} ({first_line(error)}); use "
                "another port, or 0"
            ) from error
        self.port: int = store.port
        """Port that the other members pass to `join_weight_group`."""
        self._store: Store | None = store

    def join(self, *, world_size: int, backend: str | None = None, timeout_s: float) -> WeightGroup:
        """Join the group as rank 0, which sends; returns once all members have joined.

        Args:
            world_size: number of members, this one included.
            backend: ``gloo`` or ``nccl`` for all members; by default NCCL if this one has a GPU.
            timeout_s: seconds to wait for all to join, and later for each bucket of a broadcast.

        Raises:
            ConfigError: there is no such backend here, or this host has joined before.
            WeightSyncError: a member did not join in time.
        """
        if self._store is None:
            raise ConfigError("this WeightGroupHost has joined its group; make one for each group")
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        _require_backend(backend)
        _require_rank(0, world_size)
        store, self._store = self._store, None
        store.set("backend", backend)
        return _join(store, f"{self.address}:{self.port}", 0, world_size, timeout_s)


def join_weight_group(
    address: str, port: int, *, rank: int, world_size: int, timeout_s: float
) -> WeightGroup:
    """Join the group of a `WeightGroupHost` as a receiver; returns once all members have joined.

    Args:
        address: `WeightGroupHost.address` of the trainer's rank 0.
        port: `WeightGroupHost.port`.
        rank: from 1 to world_size - 1; 0 is the host.
        world_size: number of members, the host included.
        timeout_s: seconds to wait for all to join, and later for each bucket of a broadcast.

    Raises:
        ConfigError: there is no such rank, or rank 0 chose NCCL and there is no GPU here.
        WeightSyncError: a member did not join in time, or another process has the rank.
    """
    if rank == 0:
        raise ConfigError("rank 0 of a weight group joins by WeightGroupHost.join")
    _require_rank(rank, world_size)
    where, limit = f"{address}:{port}", timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, False, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} found no rank 0 on {where} within {timeout_s:g} s; start the "
            "trainer and give all the same address"
        ) from error
    return _join(store, where, rank, world_size, timeout_s)


def _require_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"cannot join a weight group as rank {rank} of {world_size}; ranks are 0 to "
            "world_size - 1"
        )


def _require_backend(backend: str) -> None:
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"a weight group has no backend {backend!r}; pass gloo or nccl")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "a weight group over NCCL needs a GPU in each member, and this process has none; pass "
            'backend="gloo" to WeightGroupHost.join'
        )


def _join(store: Store, where: str, rank: int, world_size: int, timeout_s: float) -> WeightGroup:
    limit = timedelta(seconds=timeout_s)
    me = f"host {socket.gethostname()}, pid {os.getpid()}"
    try:
        store.set_timeout(limit)
        holder = store.compare_set(f"joined/{rank}", "", me).decode()
        if holder != me:
            raise WeightSyncError(
                f"rank {rank} of the group on {where} is taken by {holder}; give each "
                "member its own rank"
            )
        absent = find_absent(store, "joined", range(world_size), limit)
        backend = "" if absent else store.get("backend").decode()
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank 0 on {where} disconnected while rank {rank} waited for all to join; see the "
            "trainer's error, and join again"
        ) from error
    if absent:
        raise WeightSyncError(
            f"ranks {absent} of {world_size} have not joined the weight group on {where} within "
            f"{timeout_s:g} s, so rank {rank} has left it; start them and join again"
        )
    try:
        _require_backend(backend)
        made, device = _create_backend(
            backend, PrefixStore(backend, store), rank, world_size, limit
        )
    except ConfigError as error:
        store.compare_set("failed", "", f"rank {rank} gave up: {error}")
        raise
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} found all members on {where} but cannot connect to them by {backend} "
            f"({first_line(error)}); see GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from error
    group = WeightGroup(
        made, store, rank=rank, world_size=world_size, device=device, timeout_s=timeout_s
    )
    group.barrier()  # NCCL connects at the first call, without a time-out if a member is gone
    return group


def _find_own_address() -> str:
    """Return this machine's address on the default route, as other machines reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, looks up the route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _create_backend(
    backend: str, store: Store, rank: int, world_size: int, limit: timedelta
) -> tuple[Any, torch.device]:
    if backend == "gloo":
        gloo = make_gloo_options(limit, GLOO_THREADS)
        return dist.ProcessGroupGloo(store, rank, world_size, gloo), torch.device("cpu")
    options = make_nccl_options(10 * limit)  # the group's own time-out is shorter
    before, os.environ[NO_WATCHDOG] = os.environ.get(NO_WATCHDOG), "1"
    try:
        made = dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before
    return made, torch.device("cuda", torch.cuda.current_device())
