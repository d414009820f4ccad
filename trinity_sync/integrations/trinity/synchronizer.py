"""The Synchronizer in Trinity-RFT, with the name, lifetime and methods of Trinity's.

The job's actor is named ``synchronizer`` in the job's Ray namespace, where all of Trinity's
processes look it up. It ends with the last trainer or explorer, as Trinity's does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from trinity_sync.errors import ConfigError, TrinitySyncError, WeightSyncError
from trinity_sync.integrations.trinity.job import require_supported
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.synchronizer import Synchronizer

logger = logging.getLogger(__name__)

NAME = "synchronizer"
PROBE_S = 1.0
"""Seconds between two probes of trainers and explorers."""


class TrinitySynchronizer(Synchronizer):
    """Synchronizer that replaces Trinity's; its methods are those of the Ray actor."""

    @classmethod
    def get_actor(cls, config: Any = None, namespace: str | None = None, **other: Any) -> Any:
        """Return the job's Synchronizer; with Trinity's config, start it if there is none.

        Without, the actor is only looked up, in ``namespace``.

        Raises:
            ConfigError: trinity_sync does not support the config, or another job's Synchronizer is
                in the namespace.
            ValueError: there is no config and no Synchronizer.
        """
        if config is None:
            return ray.get_actor(NAME, namespace=namespace)
        require_supported(config)
        wanted = str(Path(config.checkpoint_job_dir).resolve())
        found = _find_root_in(config.ray_namespace)
        if found not in (None, wanted):
            raise ConfigError(
                f"Ray namespace {config.ray_namespace!r} has a Synchronizer already ({found}), and "
                f"{wanted} needs its own; give each job another ray_namespace, and "
                "TRINITY_PLUGIN_DIRS to all of its processes"
            )
        actor = super().get_actor(config, namespace, **other)
        context = ray.get_runtime_context()
        if context.get_actor_id() is not None:
            actor.add_module.remote(context.current_actor)
        return actor

    @classmethod
    def name_for(cls, root: str) -> str:
        """Return Trinity's name; the namespace is the job's."""
        return NAME

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._modules: set[Any] = set()
        self._returned_version = 0
        """Step of the version that `wait_new_model_state_dict` returned last."""
        self._leases: list[tuple[int, ExitStack]] = []
        """Committed steps that explorers, which Trinity does not name, may be loading."""

    async def get_root(self) -> str:
        """Return the job's root."""
        return self._root

    async def add_module(self, module_ref: Any) -> None:
        """Keep the actor alive as long as this trainer or explorer."""
        first = not self._modules
        self._modules.add(module_ref)
        if first:
            self._registry.run_in_background(self._stop_after_modules())

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """Wait as `Synchronizer` does, and lease a committed step until the explorer calls with it.

        Trinity's explorer loads the step by itself, within ``sync_timeout``, without a lease.
        """
        if held := next((each for each in self._leases if each[0] == current_version), None):
            self._leases.remove(held)
            await asyncio.to_thread(held[1].close)
        number = await super().wait_new_model_state_dict(current_version, no_wait, explorer)
        self._returned_version = number
        newest = self._registry.versions.newest("checkpoint")
        if newest and number == newest.step > current_version:
            await self._lease(explorer or self._settings.explorer, number)
        return number

    @ray.method(max_task_retries=0)  # repeated, it would go on in the middle of another version
    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Yield names and full tensors of a version, one at a time, from memory or its commit.

        It is the version that `wait_new_model_state_dict` returned, by which the explorer labels
        its rollouts, or the newest, if that version was overwritten. A checkpoint between two
        uploads is a version as well. Of one that readers refuse, nothing is yielded.
        """
        versions, step = self._registry.versions, self._returned_version
        version = versions.find(step, "memory") or versions.find(step, "checkpoint")
        version = version or versions.newest()
        if version is None or not version.readable:
            async for named in super().get_model_state_dict_iterator():
                yield named
            return
        here, limit_s = ray.get_runtime_context().current_actor, min(60.0, self._settings.timeout_s)
        reader = WeightReader(here, name="explorers", timeout_s=limit_s)
        tensors = reader.iter_weights(version)
        try:
            while item := await asyncio.to_thread(next, tensors, None):
                yield item
        except WeightSyncError as error:  # such as refused values
            logger.error("version %d is not loaded, explorers keep theirs: %s", step, error)
        finally:
            await asyncio.to_thread(tensors.close)

    async def _lease(self, name: str, step: int) -> None:
        lease = ExitStack()
        self._leases.append((step, lease))
        entering = lease_to_read(self._root, step, name, ttl_s=self._settings.timeout_s)
        try:
            await asyncio.to_thread(lease.enter_context, entering)
        except (TrinitySyncError, OSError) as error:  # loading will raise it in the explorer
            logger.warning(
                "cannot lease step %d for %s, which may be removed while it is loaded: %s",
                *(step, name, error),
            )

    async def _stop_after_modules(self) -> None:
        while self._modules:
            for module in list(self._modules):
                if await _wait_for_death(module):
                    self._modules.discard(module)
            await asyncio.sleep(PROBE_S)
        # the handle in the actor's own process knows nothing of what its creator said of a method
        ray.get_runtime_context().current_actor.stop.options(max_task_retries=0).remote()


async def _wait_for_death(actor: Any) -> bool:
    """Wait until the actor answers or dies; return whether it died."""
    try:
        await actor.__ray_ready__.remote()
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False  # it is being restarted, or cannot be reached just now
    return False


def _find_root_in(namespace: str) -> str | None:
    """Return the root of the Synchronizer in a namespace; None if there is none."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
        is_ours = hasattr(actor, "get_root")
        return str(ray.get(actor.get_root.remote())) if is_ours else "Trinity's own"
    except (ValueError, ray.exceptions.RayActorError):  # that of the last run may be stopping
        return None
