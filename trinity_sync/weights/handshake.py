"""The Synchronizer's part before a broadcast: trainer and explorers meet, and form a group.

The rules are those of `parties`; here is what they wait for, and how the dead are found out.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights import meeting
from trinity_sync.weights.liveness import PROBE_S, Liveness, find
from trinity_sync.weights.parties import Handshake, Status
from trinity_sync.weights.registry.event_loop import AsyncVersionRegistry
from trinity_sync.weights.sync_settings import SyncSettings

logger = logging.getLogger(__name__)


class Handshakes:
    """The methods of Trinity's Synchronizer that a broadcast needs."""

    def __init__(
        self, registry: AsyncVersionRegistry, namespace: str, settings: SyncSettings
    ) -> None:
        self._registry, self._namespace, self._settings = registry, namespace, settings
        self._lives = Liveness(namespace, registry.parties.actors)
        self._met: Handshake | None = None
        """The last handshake that all came to."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready_to_nccl_sync(
        self,
        module: str,
        trainer_step: int | None = None,
        explorer: str | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Trinity's: wait for the other side; the version if all are ready, None for all if not.

        The trainer meets every explorer that has not stopped. One that is dead, where it is a Ray
        actor of the Synchronizer's namespace, ends the wait; else the time-out does. Whoever gets
        None goes on with its work. Nothing has been sent yet, so no version is made: the trainer
        calls ``set_model_state_dict(None, trainer_step)`` once all have it.
        """
        who = _party(module, trainer_step, explorer or self._settings.explorer)
        if who is None:
            await self._registry.refresh()
        shake = self._registry.parties.arrive(who, trainer_step)
        self._in_background(self._note(who or self._settings.trainer))
        for party in {*self._registry.parties.live_explorers, None} - {who, *shake.watched}:
            shake.watched.add(party)
            self._in_background(self._watch(party, lambda: shake.over))
        try:
            await self._registry.notify()
            limit = self._settings.timeout_s if timeout_s is None else timeout_s
            await self._registry.until(lambda: shake.over or None, limit)
        finally:
            self._registry.parties.withdraw(shake, who)
        await self._registry.notify()
        if shake.version is None:
            logger.warning("%s was ready for a weight sync, the others were not", who or "trainer")
        else:
            self._met = shake
        return shake.version

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Trinity's: tell the explorers where the trainer's group is.

        Raises:
            WeightSyncError: one cannot be reached, failed, or did not answer in time.
        """
        explorers = await self._explorer_actors()
        limit = self._settings.timeout_s
        await meeting.announce(explorers, master_address, master_port, state_dict_meta, limit)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        """Trinity's: have trainer and explorers form the group of a broadcast.

        Raises:
            WeightSyncError: one cannot be reached, failed, or did not answer within ``timeout``
                seconds.
        """
        trainer = await find(self._settings.trainer, self._namespace)
        if trainer is None:
            raise WeightSyncError(
                f"trainer {self._settings.trainer!r} is no Ray actor of namespace "
                f"{self._namespace!r}; start it there, or name it in the settings"
            )
        await meeting.set_up(
            trainer,
            await self._explorer_actors(),
            workers=self._settings.explorer_world_size,
            group=self._settings.group,
            timeout_s=timeout or self._settings.timeout_s,
        )

    async def coordinate_weight_sync_teardown(self) -> None:
        """Trinity's: explorers leave the group, then the trainer; the dead do not hold it up."""
        names = sorted(self._registry.parties.live_explorers)
        found = {name: await find(name, self._namespace) for name in names}
        trainer = await find(self._settings.trainer, self._namespace)
        limit = min(60.0, self._settings.timeout_s)
        await meeting.tear_down(trainer, found, timeout_s=limit)

    async def _explorer_actors(self) -> dict[str, Any]:
        """Those that have not stopped.

        Raises:
            WeightSyncError: there is none, or one is no Ray actor of this namespace.
        """
        names = self._registry.parties.live_explorers or {self._settings.explorer}
        found = {name: await find(name, self._namespace) for name in sorted(names)}
        if missing := [name for name, actor in found.items() if actor is None]:
            raise WeightSyncError(
                f"explorers {', '.join(missing)} are no Ray actors of namespace "
                f"{self._namespace!r}; start them there, or set their status to stopped"
            )
        return found

    async def _watch(self, explorer: str | None, over: Callable[[], bool]) -> None:
        """Count that party (None: the trainer) out if it dies before its wait is ``over``."""
        name = explorer or self._settings.trainer
        await self._note(name)
        while not self._lives.is_dead(name):
            if await self._registry.until(lambda: over() or None, PROBE_S):
                return
        logger.warning("%s died before a weight sync", name)
        self._registry.parties.actors.discard(name)
        if explorer is None:
            self._registry.parties.set_trainer(Status.STOPPED)
        else:
            self._registry.parties.set_explorer(explorer, Status.STOPPED)
        await self._registry.notify()

    async def _note(self, name: str) -> None:
        """Look the party up, and have it known after a restart that it is an actor."""
        if await self._lives.note(name):
            self._registry.parties.note_actor(name)
            await self._registry.save()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)
        return task


def _party(module: str, trainer_step: int | None, explorer: str) -> str | None:
    if module == "explorer":
        return explorer
    if module != "trainer":
        raise ConfigError(f"module {module!r} is not known; pass 'trainer' or 'explorer'")
    if trainer_step is None:
        raise ConfigError("a trainer that is ready for a weight sync has to say its trainer_step")
    return None
