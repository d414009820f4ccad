"""Our Synchronizer in the place of Trinity's: under its name, with its life and all its methods.

A job's only one is called ``synchronizer`` in the job's Ray namespace, where all of Trinity's
processes look it up. It ends with the last trainer or explorer, as Trinity's does.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Generator
from typing import Any

import ray
import torch

from trinity_sync.errors import ConfigError, TrinitySyncError
from trinity_sync.integrations.trinity.job import require_supported
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.policies import All, parse_policy
from trinity_sync.retention.prune import prune
from trinity_sync.settings import Settings
from trinity_sync.storage.leases import Lease, acquire_lease
from trinity_sync.weights.liveness import PROBE_S, wait_for_death
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.registry.event_loop import resolve_root
from trinity_sync.weights.synchronizer import Synchronizer
from trinity_sync.weights.version import Version

logger = logging.getLogger(__name__)

NAME = "synchronizer"
Named = tuple[str, torch.Tensor]


class TrinitySynchronizer(Synchronizer):
    """See the module; methods are those of the Ray actor."""

    @classmethod
    def get_actor(cls, config: Any = None, namespace: str | None = None, **other: Any) -> Any:
        """As Trinity's: it is made where a config is given, and looked up else.

        Raises:
            ConfigError: the config asks for what trinity_sync cannot do, or another Synchronizer
                is there under this name.
            ValueError: there is none.
        """
        if config is None:
            return ray.get_actor(NAME, namespace=namespace)
        require_supported(config)
        wanted, found = resolve_root(config.checkpoint_job_dir), _served_in(config.ray_namespace)
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
        """Trinity's name; the namespace is the job's."""
        return NAME

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._modules: set[Any] = set()
        self._told = 0
        """The version of which an explorer was told last."""
        self._leases: dict[str, Lease] = {}
        """Explorer -> the committed step that it was told of last, and may be loading."""
        self._removing = asyncio.Lock()

    async def job(self) -> str:
        """The root of the job."""
        return self._root

    async def add_module(self, module_ref: Any) -> None:
        """Trinity's: live as long as this trainer or explorer does."""
        first = not self._modules
        self._modules.add(module_ref)
        if first:
            self._in_background(self._end_with_the_last())

    async def wait_new_model_state_dict(
        self, current_version: int, no_wait: bool = False, explorer: str | None = None
    ) -> int:
        """As ours; a committed step that an explorer is told of stays until it asks again.

        Trinity's explorer loads it by itself, within ``sync_timeout``, and takes no lease.
        """
        name = explorer or self._settings.explorer
        if lease := self._leases.pop(name, None):
            await asyncio.to_thread(lease.release)
        number = await super().wait_new_model_state_dict(current_version, no_wait, explorer)
        self._told = number
        newest = self._registry.versions.newest("checkpoint")
        if newest and number == newest.step > current_version:
            await self._lease(name, number)
        return number

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """Trinity's: names and whole tensors of a version in memory, one by one.

        It is the one that the explorer was told of, and by whose number it calls its rollouts; the
        newest, if that one is overwritten.
        """
        memory, (given, state) = self._registry.versions.newest("memory"), self._state
        if memory is None or (state is not None and given >= memory.step):
            async for named in super().get_model_state_dict_iterator():
                yield named
            return
        told = self._registry.versions.find(self._told, "memory") or memory
        tensors = _tensors(WeightReader(ray.get_runtime_context().current_actor, name=NAME), told)
        try:
            while (item := await asyncio.to_thread(lambda: next(tensors, None))) is not None:
                yield item
        finally:
            await asyncio.to_thread(tensors.close)

    def _on_newer_commit(self) -> None:
        """Remove what held weights only and is superseded, as Trinity does."""
        self._in_background(self._let_go())

    async def _lease(self, name: str, step: int) -> None:
        limit = self._settings.timeout_s
        try:
            self._leases[name] = await asyncio.to_thread(
                acquire_lease, self._root, step, name, ttl_s=limit
            )
        except (TrinitySyncError, OSError) as error:  # the explorer will say what is wrong with it
            logger.warning(
                "step %d is not held for %s, and may be removed while it is loaded: %s",
                step,
                name,
                error,
            )

    async def _let_go(self) -> None:
        async with self._removing:
            try:
                await asyncio.to_thread(_remove_superseded_syncs, self._root)
            except (TrinitySyncError, OSError) as error:  # the hourly retention tries it again
                logger.warning("older weights of %s stay for now: %s", self._root, error)

    async def _end_with_the_last(self) -> None:
        while self._modules:
            for module in list(self._modules):
                if await wait_for_death(module):
                    self._modules.discard(module)
            await asyncio.sleep(PROBE_S)
        ray.get_runtime_context().current_actor.stop.remote()


def _served_in(namespace: str) -> str | None:
    """The root of the job whose Synchronizer is in a namespace; None if there is none."""
    try:
        actor = ray.get_actor(NAME, namespace=namespace)
        return str(ray.get(actor.job.remote())) if hasattr(actor, "job") else "Trinity's own"
    except (ValueError, ray.exceptions.RayActorError):  # the last run's may be about to end
        return None


def _tensors(reader: WeightReader, version: Version) -> Generator[Named, None, None]:
    with reader, reader.open(version) as view:
        yield from view.iter_tensors()


def _remove_superseded_syncs(root: str) -> None:
    settings = Settings()
    rules = Rules(checkpoints=All(), syncs=parse_policy(settings.keep_syncs))
    prune(root, rules, time.time(), spool=settings.spool, recycle=settings.recycle)
