"""How trainer and explorers form, and leave, the process group of a broadcast.

They are Ray actors with Trinity's methods: ``get_weight_sync_info()`` of the trainer gives address,
port and the meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta`` and
``teardown_weight_sync_group`` are called by these functions only. All of it is bounded in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from trinity_sync.errors import WeightSyncError

logger = logging.getLogger(__name__)

Handles = Mapping[str, Any]
"""Explorer's name -> its Ray actor."""


async def set_up(
    trainer: Any,
    explorers: Handles,
    *,
    workers: int,
    group: str,
    timeout_s: float,
) -> None:
    """Have the trainer (rank 0) and ``workers`` workers of each explorer join one group.

    An explorer's first worker has rank 1; where there are several explorers, each is told its own
    as ``rank_offset``, in the order of their names.

    Raises:
        WeightSyncError: somebody failed, died or did not answer in time. Those that had joined
            are told to leave.
    """
    from ray.exceptions import RayError

    calls: dict[str, Callable[[], Awaitable[Any]]] = {}
    try:
        address, port, meta = await asyncio.wait_for(
            _awaited(trainer.get_weight_sync_info.remote()), timeout_s
        )
        world = 1 + workers * len(explorers)
        join = (address, port, world, group, timeout_s)
        calls["trainer"] = lambda: trainer.setup_weight_sync_group.remote(*join)
        for index, name in enumerate(sorted(explorers)):
            own = {"rank_offset": 1 + index * workers} if len(explorers) > 1 else {}
            calls[name] = _call(explorers[name].setup_weight_sync_group, *join, **own)
        await _all(calls, timeout_s)
        await _all(
            {name: _call(each.set_state_dict_meta, meta) for name, each in explorers.items()},
            timeout_s,
        )
    except (RayError, asyncio.TimeoutError) as error:
        await tear_down(trainer, explorers, timeout_s=min(timeout_s, 10.0))
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise WeightSyncError(
            f"the group {group!r} of trainer and {', '.join(sorted(explorers))} was not formed: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def announce(
    explorers: Handles, address: str, port: int, meta: Any, timeout_s: float
) -> None:
    """Tell explorers where the trainer's group is, for a trainer that joins by itself.

    Raises:
        WeightSyncError: one of them failed, died or did not answer in time.
    """
    from ray.exceptions import RayError

    try:
        await _all(
            {n: _call(e.setup_weight_sync_group, address, port) for n, e in explorers.items()},
            timeout_s,
        )
        if meta is not None:
            await _all(
                {n: _call(e.set_state_dict_meta, meta) for n, e in explorers.items()}, timeout_s
            )
    except (RayError, asyncio.TimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise WeightSyncError(
            f"the group at {address}:{port} was not announced to {', '.join(sorted(explorers))}: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def tear_down(trainer: Any, explorers: Handles, *, timeout_s: float) -> None:
    """Have all leave: explorers first, so that no broadcast is under way. Never raises."""
    await asyncio.gather(*(_leave(name, each, timeout_s) for name, each in explorers.items()))
    await _leave("trainer", trainer, timeout_s)


async def _leave(name: str, actor: Any, timeout_s: float) -> None:
    from ray.exceptions import RayError

    if actor is None:
        return
    try:
        await asyncio.wait_for(_awaited(actor.teardown_weight_sync_group.remote()), timeout_s)
    except (RayError, asyncio.TimeoutError) as error:
        logger.warning("%s did not leave the group of a broadcast: %r", name, error)


async def _all(calls: Mapping[str, Callable[[], Awaitable[Any]]], timeout_s: float) -> None:
    answers = (_awaited(call()) for call in calls.values())
    await asyncio.wait_for(asyncio.gather(*answers), timeout_s)


def _call(method: Any, *args: Any, **named: Any) -> Callable[[], Awaitable[Any]]:
    return lambda: method.remote(*args, **named)


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference
