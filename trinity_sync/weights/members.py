"""Trainer and explorers as Ray actors: which of them live, and the calls that make a group of them.

Ray does not report the death of an actor, but no longer finds a dead one by its name.

Members have Trinity's methods: ``get_weight_sync_info()`` of the trainer returns address, port and
the meta data of its weights; ``setup_weight_sync_group``, ``set_state_dict_meta`` and
``teardown_weight_sync_group`` are called here only. All calls are bounded in time.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from trinity_sync.errors import WeightSyncError
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.sync_barrier import Status, SyncSettings

logger = logging.getLogger(__name__)

PROBE_S = 1.0
"""Seconds between two looks for a member that others wait for."""


class Members:
    """The trainer and the explorers of a Synchronizer, in its Ray namespace."""

    def __init__(
        self, registry: AsyncVersionRegistry, namespace: str, settings: SyncSettings
    ) -> None:
        self._registry, self._namespace, self._settings = registry, namespace, settings

    def record(self, name: str) -> None:
        """Record that a member is an actor, if it is, in the background."""
        self._registry.run_in_background(self._record(name))

    def watch(self, explorer: str | None, over: Callable[[], bool]) -> "asyncio.Task[None]":
        """Set a member (None: the trainer) to stopped if it dies before the wait is ``over``.

        Returns:
            The task that watches, in the background.
        """
        return self._registry.run_in_background(self._watch(explorer, over))

    async def form_group(self, timeout_s: float) -> None:
        """Make trainer and explorers join one process group; each answer may take ``timeout_s``.

        The trainer has rank 0, and the first worker of an explorer rank 1. Several explorers get
        the rank of their first worker as ``rank_offset``, in the order of their names.

        Raises:
            WeightSyncError: a member is no actor, failed, died or did not answer in time. Members
                that had joined leave again.
        """
        from ray.exceptions import RayError

        names = [self._settings.trainer, *self._explorer_names]
        actors = [await self._find(name) for name in names]
        if missing := [name for name, actor in zip(names, actors, strict=True) if actor is None]:
            raise WeightSyncError(
                f"{', '.join(missing)} are no Ray actors of namespace {self._namespace!r}; start "
                "them there, name the trainer in the settings, or set an explorer's status to "
                "stopped"
            )
        (trainer, *explorers), group = actors, self._settings.group
        workers = self._settings.explorer_world_size
        try:
            info = trainer.get_weight_sync_info.remote()
            address, port, meta = await asyncio.wait_for(info, timeout_s)
            join = (address, port, 1 + workers * len(explorers), group, timeout_s)
            calls = []
            for index, explorer in enumerate(explorers):
                own = {"rank_offset": 1 + index * workers} if len(explorers) > 1 else {}
                calls.append(explorer.setup_weight_sync_group.remote(*join, **own))
            calls.append(trainer.setup_weight_sync_group.remote(*join))
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
            calls = [each.set_state_dict_meta.remote(meta) for each in explorers]
            await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
        except (TimeoutError, RayError) as error:
            await self.leave_group(min(timeout_s, 10.0))
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise WeightSyncError(
                f"the group {group!r} of {', '.join(names)} was not formed: {reason}. See the logs "
                "of these actors, and set it up again."
            ) from error

    async def leave_group(self, timeout_s: float) -> None:
        """Make all members leave, explorers first, so no broadcast is in flight. Never raises.

        Each answer may take ``timeout_s``.
        """
        await asyncio.gather(*(self._leave(name, timeout_s) for name in self._explorer_names))
        await self._leave(self._settings.trainer, timeout_s)

    async def _leave(self, name: str, timeout_s: float) -> None:
        from ray.exceptions import RayError

        if (actor := await self._find(name)) is None:
            return
        try:
            await asyncio.wait_for(actor.teardown_weight_sync_group.remote(), timeout_s)
        except (TimeoutError, RayError) as error:
            logger.warning("%s did not leave the group of a broadcast: %r", name, error)

    async def _find(self, name: str) -> Any:
        """Return a live actor, or None, without blocking the event loop."""
        import ray

        try:
            return await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return None

    @property
    def _explorer_names(self) -> list[str]:
        return sorted(self._registry.barrier.live_explorers or {self._settings.explorer})

    async def _record(self, name: str) -> Any:
        if actor := await self._find(name):
            self._registry.barrier.actors.add(name)
        return actor

    async def _watch(self, explorer: str | None, over: Callable[[], bool]) -> None:
        name, barrier = explorer or self._settings.trainer, self._registry.barrier
        known = None
        while True:
            actor = await self._record(name)
            is_gone = actor is None and name in barrier.actors
            if is_gone or known not in (None, actor):  # another actor may have its name already
                break
            known = actor
            if await self._registry.until(lambda: over() or None, PROBE_S):
                return
        logger.warning("%s died before a weight sync and counts as stopped", name)
        barrier.actors.discard(name)
        if explorer is None:
            barrier.set_trainer(Status.STOPPED)
        else:
            barrier.set_explorer(explorer, Status.STOPPED)
        await self._registry.notify()
