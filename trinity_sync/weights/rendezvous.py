"""The rendezvous of trainer and explorers before a broadcast.

The rules are those of `sync_barrier`; here are the waits, and the detection of dead members. The
calls that set up the process group are in ``group_setup``.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from trinity_sync.errors import ConfigError, WeightSyncError
from trinity_sync.weights.group_setup import form_group, leave_group, send_group_address
from trinity_sync.weights.liveness import PROBE_S, Liveness, find_actor
from trinity_sync.weights.registry.event_loop import AsyncVersionRegistry
from trinity_sync.weights.sync_barrier import Rendezvous, Status
from trinity_sync.weights.sync_settings import SyncSettings

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
