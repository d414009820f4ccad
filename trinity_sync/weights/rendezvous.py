"""The rendezvous before a broadcast: trainer and explorers meet, and form a process group.

The rules are those of `sync_barrier`; here are the waits, the detection of dead members, and the
calls that form a group. Members are Ray actors with Trinity's methods: ``get_weight_sync_info()``
of the trainer returns address, port and the meta data of its weights; ``setup_weight_sync_group``,
``set_state_dict_meta`` and ``teardown_weight_sync_group`` are called by the functions below only.
All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.liveness import PROBE_S, Liveness, find_actor
from trinity_sync.weights.registry.event_loop import AsyncVersionRegistry
from trinity_sync.weights.sync_barrier import Rendezvous, Status
from trinity_sync.weights.sync_settings import SyncSettings

logger = logging.getLogger(__name__)


class BroadcastRendezvous:
    """The methods of Trinity's Synchronizer that a broadcast needs.

    Args:
        registry: versions and members of the job.
        namespace: Ray namespace of the members.
        settings: names of the members, and time limits.
    """

    def __init__(
        self, registry: AsyncVersionRegistry, namespace: str, settings: SyncSettings
    ) -> None:
        self._registry, self._namespace, self._settings = registry, namespace, settings
        self._lives = Liveness(namespace, registry.barrier.actors)
        self._last_rendezvous: Rendezvous | None = None
        """The last that succeeded."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready_to_nccl_sync(
        self,
        module: str,
        trainer_step: int | None = None,
        explorer: str | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Trinity's: wait at the barrier before a broadcast.

        The trainer waits for every explorer that has not stopped. A dead member ends the wait if it
        is a Ray actor of the Synchronizer's namespace; otherwise the time-out does. Nothing has
        been sent yet, so no version is recorded: the trainer calls
        ``set_model_state_dict(None, trainer_step)`` after the broadcast.

        Args:
            module: ``trainer`` or ``explorer``.
            trainer_step: step that the trainer sends.
            explorer: name of the explorer; by default the one in the settings.
            timeout_s: seconds to wait; by default those of the settings.

        Returns:
            The step if all members are ready; None for all of them if not.

        Raises:
            ConfigError: ``module`` is unknown, or a trainer passes no step.
        """
        name = _member_name(module, trainer_step, explorer or self._settings.explorer)
        if name is None:
            await self._registry.refresh()
        rendezvous = self._registry.barrier.arrive(name, trainer_step)
        self._in_background(self._record_actor(name or self._settings.trainer))
        for member in {*self._registry.barrier.live_explorers, None} - {name, *rendezvous.watched}:
            rendezvous.watched.add(member)
            self._in_background(self._watch(member, lambda: rendezvous.over))
        try:
            await self._registry.notify()
            limit = self._settings.timeout_s if timeout_s is None else timeout_s
            await self._registry.until(lambda: rendezvous.over or None, limit)
        finally:
            self._registry.barrier.withdraw(rendezvous, name)
        await self._registry.notify()
        if rendezvous.version is None:
            logger.warning(
                "%s was ready for a weight sync, but not all other members were", name or "trainer"
            )
        else:
            self._last_rendezvous = rendezvous
        return rendezvous.version

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Trinity's: send the explorers the address of the trainer's group.

        Args:
            master_address: host of the trainer's rank 0.
            master_port: port that rank 0 listens on.
            state_dict_meta: name, dtype and shape of each tensor.

        Raises:
            WeightSyncError: an explorer cannot be reached, failed, or did not answer in time.
        """
        explorers = await self._explorer_actors()
        limit = self._settings.timeout_s
        await announce_group(explorers, master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Trinity's: have trainer and explorers form the group of a broadcast.

        Raises:
            WeightSyncError: a member cannot be reached, failed, or did not answer within
                ``timeout`` seconds.
        """
        trainer = await find_actor(self._settings.trainer, self._namespace)
        if trainer is None:
            raise WeightSyncError(
                f"trainer {self._settings.trainer!r} is no Ray actor of namespace "
                f"{self._namespace!r}; start it there, or name it in the settings"
            )
        await form_group(
            trainer,
            await self._explorer_actors(),
            workers=self._settings.explorer_world_size,
            group=self._settings.group,
            timeout_s=timeout or self._settings.timeout_s,
        )

    async def coordinate_weight_sync_teardown(self) -> None:
        """Trinity's: explorers leave the group, then the trainer; dead members are skipped."""
        names = sorted(self._registry.barrier.live_explorers)
        found = {name: await find_actor(name, self._namespace) for name in names}
        trainer = await find_actor(self._settings.trainer, self._namespace)
        limit = min(60.0, self._settings.timeout_s)
        await leave_group(trainer, found, timeout_s=limit)

    async def _explorer_actors(self) -> dict[str, Any]:
        """Return the actors of the explorers that have not stopped.

        Raises:
            WeightSyncError: an explorer is no Ray actor of this namespace.
        """
        names = self._registry.barrier.live_explorers or {self._settings.explorer}
        found = {name: await find_actor(name, self._namespace) for name in sorted(names)}
        if missing := [name for name, actor in found.items() if actor is None]:
            raise WeightSyncError(
                f"explorers {', '.join(missing)} are no Ray actors of namespace "
                f"{self._namespace!r}; start them there, or set their status to stopped"
            )
        return found

    async def _watch(self, explorer: str | None, over: Callable[[], bool]) -> None:
        """Set a member (None: the trainer) to stopped if it dies before the wait is ``over``."""
        name = explorer or self._settings.trainer
        await self._record_actor(name)
        while not self._lives.is_dead(name):
            if await self._registry.until(lambda: over() or None, PROBE_S):
                return
        logger.warning("%s died before a weight sync and counts as stopped", name)
        self._registry.barrier.actors.discard(name)
        if explorer is None:
            self._registry.barrier.set_trainer(Status.STOPPED)
        else:
            self._registry.barrier.set_explorer(explorer, Status.STOPPED)
        await self._registry.notify()

    async def _record_actor(self, name: str) -> None:
        """Look a member up; a restart knows from the state file that it is an actor."""
        if await self._lives.look_up(name):
            self._registry.barrier.add_actor(name)
            await self._registry.save()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)
        return task


def _member_name(module: str, trainer_step: int | None, explorer: str) -> str | None:
    if module == "explorer":
        return explorer
    if module != "trainer":
        raise ConfigError(f"module {module!r} is not known; pass 'trainer' or 'explorer'")
    if trainer_step is None:
        raise ConfigError("a trainer that is ready for a weight sync has to say its trainer_step")
    return None


async def form_group(
    trainer: Any,
    explorers: Mapping[str, Any],
    *,
    workers: int,
    group: str,
    timeout_s: float,
) -> None:
    """Have trainer and explorers join one process group.

    The trainer has rank 0. An explorer's first worker has rank 1; several explorers are each told
    theirs as ``rank_offset``, in the order of their names.

    Args:
        trainer: its Ray actor.
        explorers: Ray actors of the explorers, by name.
        workers: workers of each explorer that join.
        group: name of the group.
        timeout_s: seconds to wait for each answer.

    Raises:
        WeightSyncError: a member failed, died or did not answer in time. Members that had joined
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
        await leave_group(trainer, explorers, timeout_s=min(timeout_s, 10.0))
        reason = str(error) or f"no answer within {timeout_s:g} s"
        raise WeightSyncError(
            f"the group {group!r} of trainer and {', '.join(sorted(explorers))} was not formed: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def announce_group(
    explorers: Mapping[str, Any], address: str, port: int, meta: Any, timeout_s: float
) -> None:
    """Send explorers the address of the trainer's group, for a trainer that joins by itself.

    Args:
        explorers: Ray actors of the explorers, by name.
        address: host of the trainer's rank 0.
        port: port that rank 0 listens on.
        meta: name, dtype and shape of each tensor; None is not sent.
        timeout_s: seconds to wait for each answer.

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
            f"the group at {address}:{port} was not announced to {', '.join(sorted(explorers))}: "
            f"{reason}. See the logs of these actors, and set it up again."
        ) from error


async def leave_group(trainer: Any, explorers: Mapping[str, Any], *, timeout_s: float) -> None:
    """Have all members leave, explorers first, so no broadcast is under way. Never raises.

    Args:
        trainer: its Ray actor; None if it is not found.
        explorers: Ray actors of the explorers by name; None if one is not found.
        timeout_s: seconds to wait for each answer.
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
