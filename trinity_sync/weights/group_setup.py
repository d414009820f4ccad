"""Calls to trainer and explorers that set up the process group of a broadcast, and end it.

Members are Ray actors with Trinity's methods: ``get_weight_sync_info()`` of the trainer returns
address, port and the meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta``
and ``teardown_weight_sync_group`` are called here only. All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    names = ", ".join(sorted(explorers))
    try:
        with _name_failure(f"the group {group!r} of trainer and {names} was not formed", timeout_s):
            info = trainer.get_weight_sync_info.remote()
            address, port, meta = await asyncio.wait_for(info, timeout_s)
            join = (address, port, 1 + workers * len(explorers), group, timeout_s)
            calls = []
            for index, name in enumerate(sorted(explorers)):
                own = {"rank_offset": 1 + index * workers} if len(explorers) > 1 else {}
                calls.append(explorers[name].setup_weight_sync_group.remote(*join, **own))
            calls.append(trainer.setup_weight_sync_group.remote(*join))
            await _wait_all(calls, timeout_s)
            await _send_meta(explorers, meta, timeout_s)
    except WeightSyncError:
        await leave_group(trainer, explorers, timeout_s=min(timeout_s, 10.0))
        raise


async def send_group_address(
    explorers: Mapping[str, Any], address: str, port: int, meta: Any, timeout_s: float
) -> None:
    """Send explorers the address of the trainer's group, for a trainer that joins by itself.

    Address and port are those of rank 0. ``meta``, unless None, has name, dtype and shape of each
    tensor. Each answer may take ``timeout_s``.

    Raises:
        WeightSyncError: an explorer failed, died or did not answer in time.
    """
    names = ", ".join(sorted(explorers))
    failure = f"the address of the group at {address}:{port} was not sent to {names}"
    with _name_failure(failure, timeout_s):
        calls = [each.setup_weight_sync_group.remote(address, port) for each in explorers.values()]
        await _wait_all(calls, timeout_s)
        if meta is not None:
            await _send_meta(explorers, meta, timeout_s)


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
        await asyncio.wait_for(actor.teardown_weight_sync_group.remote(), timeout_s)
    except (RayError, asyncio.TimeoutError) as error:
        logger.warning("%s did not leave the group of a broadcast: %r", name, error)


async def _send_meta(explorers: Mapping[str, Any], meta: Any, timeout_s: float) -> None:
    calls = [each.set_state_dict_meta.remote(meta) for each in explorers.values()]
    await _wait_all(calls, timeout_s)


async def _wait_all(calls: Iterable[Awaitable[Any]], timeout_s: float) -> None:
    await asyncio.wait_for(asyncio.gather(*calls), timeout_s)


@contextmanager
def _name_failure(failure: str, timeout_s: float) -> Iterator[None]:
    """Raise a failed, dead or silent actor's error as a WeightSyncError that begins so."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, asyncio.TimeoutError) as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise WeightSyncError(
            f"{failure}: {reason}. See the logs of these actors, and set it up again."
        ) from error
