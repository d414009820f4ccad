"""Make a process group of the trainer and the processes that receive its weights.

The trainer's rank 0 and the explorers' workers are in different default groups, or in none. So the
group is made of torch's public parts without a default group: a ``TCPStore`` on rank 0, at a port
that the kernel chooses, for the rendezvous of the members, and a ``ProcessGroupGloo`` or
``ProcessGroupNCCL`` on top of it. ``torch.distributed``'s global state is neither read nor changed.

The NCCL side has not run on a GPU yet.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.snapshot.torch_private import make_gloo_options, make_nccl_options
from trinity_sync.weights.weight_group import WeightGroup, find_absent, first_line

GLOO_THREADS = 8
"""Broadcasts in flight at a time: with torch's two, a receiver that is slow to wake up on busy
cores has posted no further receive when one ends, and 4 MiB took 1.3 times as long."""
NO_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
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

    def join(
        self, *, world_size: int, backend: str | None = None, timeout_s: float
    ) -> "WeightGroup":
        """Join the group as rank 0, which sends; returns once all members have joined.

        Args:
            world_size: number of members, this one included.
            backend: ``gloo`` or ``nccl``; by default NCCL where there is a GPU. The same for all.
            timeout_s: seconds to wait for all to join, and later for each bucket of a broadcast.

        Raises:
            ConfigError: there is no such backend, the members chose different ones, or this host
                has joined before.
            WeightSyncError: a member did not join in time.
        """
        if self._store is None:
            raise ConfigError("this WeightGroupHost has joined its group; make one for each group")
        backend = _check_member(0, world_size, backend)
        store, self._store = self._store, None
        where = f"{self.address}:{self.port}"
        return _join(store, where, 0, world_size, backend, timeout_s)


def join_weight_group(
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    backend: str | None = None,
    timeout_s: float,
) -> WeightGroup:
    """Join the group of a `WeightGroupHost` as a receiver; returns once all members have joined.

    Args:
        address: `WeightGroupHost.address` of the trainer's rank 0.
        port: `WeightGroupHost.port`.
        rank: from 1 to world_size - 1; 0 is the host.
        world_size: number of members, the host included.
        backend: ``gloo`` or ``nccl``; by default NCCL where there is a GPU. The same for all.
        timeout_s: seconds to wait for all to join, and later for each bucket of a broadcast.

    Raises:
        ConfigError: no such backend or rank, or the members chose different ones.
        WeightSyncError: a member did not join in time, or another process has the rank.
    """
    if rank == 0:
        raise ConfigError("rank 0 of a weight group joins by WeightGroupHost.join")
    backend = _check_member(rank, world_size, backend)
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
    return _join(store, where, rank, world_size, backend, timeout_s)


def _check_member(rank: int, world_size: int, backend: str | None) -> str:
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in ("gloo", "nccl") or not 0 <= rank < world_size:
        raise ConfigError(
            f"cannot join a weight group as rank {rank} of {world_size} by {backend!r}; ranks are "
            "0 to world_size - 1, backends are gloo and nccl"
        )
    return backend


def _join(
    store: Store, where: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> WeightGroup:
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
        store.set(f"backend/{rank}", backend)
        absent = find_absent(store, "joined", range(world_size), limit)
        if not absent:
            _require_one_backend(store, rank, world_size, limit)
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
        made, device = _create_backend(
            backend, PrefixStore(backend, store), rank, world_size, limit
        )
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} found all members on {where} but cannot connect to them by {backend} "
            f"({first_line(error)}); see GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from error
    group = WeightGroup(
        made,
        store,
        rank=rank,
        world_size=world_size,
        device=device,
        timeout_s=timeout_s,
        watched=backend == "nccl",
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
    with _environment(NO_WATCHDOG):
        made = dist.ProcessGroupNCCL(store, rank, world_size, options)
    return made, torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _require_one_backend(store: Store, rank: int, world_size: int, limit: timedelta) -> None:
    chosen = [store.get(f"backend/{each}").decode() for each in range(world_size)]
    if len({*chosen}) == 1:
        return
    store.set(f"compared/{rank}", "")
    if rank == 0:  # it has the store, which the other members still have to read
        find_absent(store, "compared", range(world_size), limit)
    names = ", ".join(f"rank {each} by {backend}" for each, backend in enumerate(chosen))
    raise ConfigError(
        f"the members of a weight group chose different back ends, {names}; pass the same backend= "
        "on all sides, NCCL only if each has a GPU"
    )
