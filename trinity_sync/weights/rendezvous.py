"""The rendezvous of trainer and explorers before a broadcast.

The rules are those of `sync_barrier`; here are the waits, and the detection of dead members.

Ray does not report the death of an actor, so each is probed, one call at a time: a busy actor
answers late, a dead one never.

Members are Ray actors with Trinity's methods: ``get_weight_sync_info()`` of the trainer returns
address, port and the meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta``
and ``teardown_weight_sync_group`` are called here only. All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.sync_barrier import Rendezvous, Status, SyncSettings

logger = logging.getLogger(__name__)


class BroadcastRendezvous:
    """The methods of Trinity's Synchronizer that a broadcast needs."""

    def __init__(
        self, registry: AsyncVersionRegistry, namespace: str, settings: SyncSettings
    ) -> None:
        self._registry, self._namespace, self._settings = registry, namespace, settings
        self._lives = Liveness(namespace, registry.barrier.actors)
        self.last: Rendezvous | None = None
        """The last rendezvous that succeeded."""

    async def ready_to_nccl_sync(
        self,
        module: str,
        trainer_step: int | None = None,
        explorer: str | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Wait at the barrier before a broadcast.

        The trainer waits for every explorer that has not stopped. A dead member ends the wait if it
        is a Ray actor of the Synchronizer's namespace; otherwise the time-out does. Nothing has
        been sent yet, so no version is recorded: the trainer calls
        ``set_model_state_dict(None, trainer_step)`` after the broadcast.

        Args:
            module: ``trainer`` or ``explorer``.
            trainer_step: step that the trainer sends; an explorer passes none.
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
        self.record_actor(name or self._settings.trainer)
        for member in {*self._registry.barrier.live_explorers, None} - {name, *rendezvous.watched}:
            rendezvous.watched.add(member)
            self.watch(member, lambda: rendezvous.over)
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
            self.last = rendezvous
        return rendezvous.version

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Send the explorers the address of the trainer's group.

        Args:
            master_address: host of the trainer's rank 0.
            master_port: port that rank 0 listens on.
            state_dict_meta: name, dtype and shape of each tensor.

        Raises:
            WeightSyncError: an explorer cannot be reached, failed, or did not answer in time.
        """
        explorers = await self._explorer_actors()
        limit = self._settings.timeout_s
        await send_group_address(explorers, master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Make trainer and explorers form the process group of a broadcast.

        Args:
            timeout: seconds to wait for each answer; by default those of the settings.

        Raises:
            WeightSyncError: a member cannot be reached, failed, or did not answer in time.
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
        """Make explorers leave the process group, then the trainer; dead members are skipped."""
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

    def record_actor(self, name: str) -> None:
        """Look a member up, in the background."""
        self._registry.run_in_background(self._record_actor(name))

    def watch(self, explorer: str | None, over: Callable[[], bool]) -> "asyncio.Task[None]":
        """Set a member (None: the trainer) to stopped if it dies before the wait is ``over``.

        Returns:
            The task that watches, in the background.
        """
        return self._registry.run_in_background(self._watch(explorer, over))

    async def _watch(self, explorer: str | None, over: Callable[[], bool]) -> None:
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


def _member_name(module: str, trainer_step: int | None, explorer: str) -> str | None:
    if module == "explorer":
        return explorer
    if module != "trainer":
        raise ConfigError(f"module {module!r} is not known; pass 'trainer' or 'explorer'")
    if trainer_step is None:
        raise ConfigError("a trainer that is ready for a weight sync has to say its trainer_step")
    return None


PROBE_S = 1.0
"""Seconds between two probes of a member that others wait for."""


class Liveness:
    """Liveness of the actors of one Ray namespace.

    ``known`` are the names that are known to be actors, also from an earlier process; the caller
    updates it.
    """

    def __init__(self, namespace: str, known: Collection[str]) -> None:
        self._namespace, self._known = namespace, known
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, asyncio.Task[bool]] = {}
        """Actor -> the probe that is in flight, or the last one."""

    async def look_up(self, name: str) -> bool:
        """Look up a live actor by name, since a dead one is not found; return whether it exists."""
        actor = await find_actor(name, self._namespace)
        if actor is None:
            return False
        before = self._actors.get(name)
        self._actors[name] = actor
        if before is not None and before != actor:
            self._asked.pop(before, None)
        return True

    def is_dead(self, name: str) -> bool:
        """Return whether the actor has died by its last probe, and start the next one.

        False for a name that never was an actor of the namespace. A known actor that `look_up` did
        not find has died between two probes.
        """
        actor = self._actors.get(name)
        if actor is None:
            return name in self._known
        asked = self._asked.get(actor)
        if asked and not asked.done():
            return False
        if asked and asked.result():
            del self._actors[name], self._asked[actor]
            return True
        self._asked[actor] = asyncio.get_running_loop().create_task(wait_for_death(actor))
        return False


async def find_actor(name: str, namespace: str) -> Any:
    """Return a Ray actor, or None, without blocking the event loop."""
    import ray

    try:
        return await asyncio.to_thread(ray.get_actor, name, namespace)
    except ValueError:
        return None


async def wait_for_death(actor: Any) -> bool:
    """Wait until the actor answers or dies; return whether it died."""
    import ray

    try:
        await actor.__ray_ready__.remote()
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False  # it is being restarted, or cannot be reached just now
    return False


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
