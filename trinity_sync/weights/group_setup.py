"""Calls to trainer and explorers that set up the process group of a broadcast, and end it.

Members are Ray actors with Trinity's methods: ``get_weight_sync_info()`` of the trainer returns
address, port and the meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta``
and ``teardown_weight_sync_group`` are called here only. All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from trinity_sync.errors import WeightSyncError

logger = logging.getLogger(__name__)


async def form_group(
    trainer: Any,
    explorers: Mapping[str, Any],
    *,
    workers: int,
    group: str,
    timeout_s: float,
) -> None:
    """Make trainer and explorers join one process group; each answer may take ``timeout_s``.

    The trainer has rank 0, and the first of an explorer's ``workers`` rank 1. Several explorers get
    the rank of their first worker as ``rank_offset``, in the order of their names.

    Raises:
        WeightSyncError: a member failed, died or did not answer in time. Members that had joined
            leave again.
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
        await leave_group(trainer, explorers, timeout_s=min(timeout_s, 10.0))
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise WeightSyncError(
            f"the group {group!r} of trainer and {', '.join(sorted(explorers))} was not formed: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def send_group_address(
    explorers: Mapping[str, Any], address: str, port: int, meta: Any, timeout_s: float
) -> None:
    """Send explorers the address of the trainer's group, for a trainer that joins by itself.

    Address and port are those of rank 0. ``meta``, unless None, has name, dtype and shape of each
    tensor. Each answer may take ``timeout_s``.

    Raises:
        WeightSyncError: an explorer failed, died or did not answer in time.
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
            f"the address of the group at {address}:{port} was not sent to "
            f"{', '.join(sorted(explorers))}: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def leave_group(trainer: Any, explorers: Mapping[str, Any], *, timeout_s: float) -> None:
    """Make all members leave, explorers first, so no broadcast is in flight. Never raises.

    An actor that was not found is None. Each answer may take ``timeout_s``.
    """
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
